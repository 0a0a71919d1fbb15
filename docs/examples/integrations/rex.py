"""A shell of SWE-ReX, gone on with from the middle."""

import asyncio

from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

from snapshotd.integrations.swe_rex import RexDeployment


async def main() -> None:
    deployment = RexDeployment()
    await deployment.start()
    shell = deployment.runtime
    await shell.create_session(CreateBashSessionRequest())
    first = await shell.run_in_session(
        BashAction(command="mkdir -p app; cd app; note() { echo $1 >> notes; }; note one")
    )
    await shell.run_in_session(BashAction(command="note two"))

    other = RexDeployment(snapshot=first.snapshot)  # a fork of the first command's files, with its shell
    await other.start()
    await other.runtime.create_session(CreateBashSessionRequest())
    for runtime in (shell, other.runtime):
        print((await runtime.run_in_session(BashAction(command="note more; cat notes"))).output.split())

    await shell.box.rewind(first.snapshot)  # the same sandbox, and its shell, as they were
    print((await shell.run_in_session(BashAction(command="cat notes; pwd"))).output.split())
    await deployment.stop()
    await other.stop()


asyncio.run(main())
