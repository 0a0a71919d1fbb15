"""A program on SWE-ReX, with scripted commands: each adds its number to `log` in the directory of its shell.

rex_agent.py NOTES travel               | all steps, then back in the same sandbox, and a fork of the middle
rex_agent.py NOTES run KILL STEP [FROM] | the steps that NOTES has not noted yet, in a fork of the last one noted; KILL
                                          ("before", "within", "after" or "never"): SIGKILL at that point of that step
rex_agent.py NOTES errors               | what cannot be
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError, SwerexException
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest, ReadFileRequest

from snapshotd.integrations.swe_rex import RexDeployment

STEPS = 4
STEP = "count=$((${count:-0} + 1)); add() { echo $count >> log; }; mkdir -p /srv/work; cd /srv/work; add"


async def opened(snapshot: str | None = None) -> RexDeployment:
    deployment = RexDeployment(snapshot=snapshot)
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    return deployment


async def said(deployment: RexDeployment, command: str) -> str:
    return " ".join((await deployment.runtime.run_in_session(BashAction(command=command))).output.split())


async def travel(notes: Path) -> None:
    deployment = await opened()
    made = [await deployment.runtime.run_in_session(BashAction(command=STEP)) for _ in range(STEPS)]
    notes.write_text(json.dumps([one.snapshot for one in made]))
    sys.stdout.write(f"{await said(deployment, 'cat log')}\n")
    fork = await opened(made[1].snapshot)
    sys.stdout.write(f"fork: {await said(fork, 'add; cat log; pwd')}\n")
    await deployment.runtime.box.rewind(made[1].snapshot)
    sys.stdout.write(f"back: {await said(deployment, 'cat log; echo $count in $PWD')}\n")
    sys.stdout.write(f"again: {await said(deployment, f'{STEP}; cat log')}\n")
    await deployment.stop()
    await fork.stop()


async def run(notes: Path, kill: str, doomed: int) -> None:
    known = json.loads(notes.read_text()) if notes.exists() else []
    deployment = await opened(known[-1] if known else None)
    for step in range(len(known) + 1, STEPS + 1):
        if step == doomed and kill == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        command = STEP
        if step == doomed and kill == "within":
            asyncio.get_running_loop().create_task(kill_when_begun(deployment))
            command += "; touch begun; sleep 2"
        made = await deployment.runtime.run_in_session(BashAction(command=command))
        if step == doomed and kill == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        known.append(made.snapshot)
        part = notes.with_suffix(".part")
        part.write_text(json.dumps(known))
        part.replace(notes)
    sys.stdout.write(f"{await said(deployment, 'cat log')}\n")
    await deployment.stop()


async def kill_when_begun(deployment: RexDeployment) -> None:
    while not await deployment.runtime.box.files.exists("/srv/work/begun"):
        await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


async def errors() -> None:
    try:
        _ = RexDeployment().runtime
    except DeploymentNotStartedError:
        sys.stdout.write("not started\n")
    for one in (RexDeployment(snapshot="nosuch"), RexDeployment(image="no-such-image")):
        try:
            await one.start()
        except DeploymentStartupError as exc:
            sys.stdout.write(f"{'nosuch' in str(exc) or 'no-such-image' in str(exc)}\n")
    deployment = await opened()
    await deployment.runtime.box.remove(force=True)
    for what in (
        deployment.runtime.run_in_session(BashAction(command="true")),
        deployment.runtime.execute(Command(command=["true"])),
        deployment.runtime.read_file(ReadFileRequest(path="/etc/passwd")),
    ):
        try:
            await what
        except (SwerexException, FileNotFoundError) as exc:
            sys.stdout.write(f"{type(exc).__name__}\n")
    sys.stdout.write(f"{bool(await deployment.is_alive())}\n")
    await deployment.stop()


if __name__ == "__main__":
    place, what = Path(sys.argv[1]), sys.argv[2]
    if what == "travel":
        asyncio.run(travel(place))
    elif what == "run":
        asyncio.run(run(place, sys.argv[3], int(sys.argv[4])))
    else:
        asyncio.run(errors())
