"""Rollouts through NeMo Gym's own `AsyncSandbox`, which finds our provider by its entry point: gym_rollout.py WHAT [DESCRIPTOR]

Prints JSON. "rollout": three commands, the descriptor of each, and the last as it is serialized; "goes on": from a descriptor, in
another process; "cut off": the daemon is killed within a command; "restored": from a descriptor; "errors": what cannot be.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import AsyncSandbox, SandboxCreateError, SandboxSpec, create_provider, list_providers

from snapshotd.integrations.nemo_gym import StaleHandleError

CONFIG = {"snapshotd": {"runtime": "runc"}}


async def log_of(provider: Any, handle: Any) -> str:
    return " ".join(str((await provider.exec(handle, "cat /work/log")).stdout).split())


async def refused(work: Any) -> str:
    try:
        await work
    except (StaleHandleError, SandboxCreateError, FileNotFoundError, ValueError) as exc:
        return type(exc).__name__
    return "nothing"


async def rollout() -> dict[str, Any]:
    provider: Any = create_provider(CONFIG)
    spec = SandboxSpec(workdir="/work", env={"WHO": "gym"}, files={"/work/given": "given\n"})
    sandbox = await AsyncSandbox(provider, spec).start()
    handle = sandbox._handle
    taken = []
    for step in (1, 2, 3):
        done = await sandbox.exec(f"echo {step} >> log; cat given; echo $WHO >&2; exit {step}")
        assert (done.stdout, done.stderr, done.return_code) == ("given\n", "gym\n", step), done
        taken.append(await provider.snapshot(handle))
    slow = await sandbox.exec("echo begun; sleep 60", timeout_s=1)
    with tempfile.TemporaryDirectory() as folder:
        await sandbox.download("/work/log", Path(folder) / "deep" / "log")
        fetched = (Path(folder) / "deep" / "log").read_text()
    return {
        "providers": list_providers(),
        "taken": taken,
        "fetched": fetched,
        "slow": [slow.stdout, slow.return_code, slow.error_type],
        "status": await sandbox.status(),
    }


async def goes_on(given: dict[str, Any]) -> dict[str, Any]:
    provider: Any = create_provider(CONFIG)
    again = await provider.connect(given)  # the process that made it has gone away
    now = await log_of(provider, again)
    one, other = await provider.clone(given), await provider.clone(given)
    await provider.exec(one, "echo clone >> /work/log")
    clones = [await log_of(provider, one), await log_of(provider, other)]
    running = asyncio.create_task(provider.exec(again, "echo stale >> /work/log; sleep 60"))
    while "sleep" not in str((await provider.exec(again, "cat /proc/*/comm")).stdout):
        await asyncio.sleep(0.05)
    restores = await asyncio.gather(*(provider.restore(given) for _ in range(2)), return_exceptions=True)
    (restored,) = (found for found in restores if not isinstance(found, BaseException))
    calls = (
        running,
        provider.restore(given),
        provider.exec(again, "true"),
        provider.upload_file(again, Path("/etc/hostname"), "/work/x"),
        provider.connect(given),
    )
    stale = [await refused(call) for call in calls]
    found = {
        "now": now,
        "clones": clones,
        "restores": sorted(type(found).__name__ for found in restores),
        "restored": await log_of(provider, restored),
        "stale": stale,
        "statuses": [await provider.status(handle) for handle in (again, restored)],
    }
    later = await provider.snapshot(restored)
    await provider.retire(later)
    await provider.retire(later)
    found["retired"] = await refused(provider.restore(later))
    return found


async def cut_off() -> dict[str, Any]:
    provider: Any = create_provider(CONFIG)
    handle = await provider.create(SandboxSpec(workdir="/work"))
    await provider.exec(handle, "echo 1 >> /work/log")
    taken = await provider.snapshot(handle)
    done = await provider.exec(handle, "echo 2 >> /work/log; exec sleep 6062")
    return {"answer": [done.return_code, done.error_type], "taken": taken}


async def restored(given: dict[str, Any]) -> dict[str, Any]:
    provider: Any = create_provider(CONFIG)
    handle = await provider.restore(given)
    await provider.exec(handle, "echo again >> /work/log")
    return {"restored": await log_of(provider, handle)}


async def errors() -> dict[str, Any]:
    provider: Any = create_provider(CONFIG)
    handle = await provider.create(SandboxSpec())
    found = [
        await refused(provider.create(SandboxSpec(image="no-such-image"))),
        await refused(provider.create(SandboxSpec(provider_options={"snapshot": "nosuch"}))),
        await refused(provider.create(SandboxSpec(provider_options={"wrong": 1}))),
        await refused(provider.create(SandboxSpec(resources={"gpu": 1}))),
        await refused(provider.download_file(handle, "/none", Path("/tmp/plug-none"))),
    ]
    gone = await provider.serialize_handle(handle)
    missing = await provider.exec(handle, "true", user="nobody-such")
    await handle.raw.box.remove(force=True)
    dead = await provider.exec(handle, "true")
    found += [await refused(provider.restore(gone)), await refused(provider.connect(gone))]
    await provider.close(handle)
    answers = [[one.return_code, one.error_type] for one in (missing, dead)]
    return {"refused": found, "answers": answers, "status": await provider.status(handle)}


def main() -> None:
    what, *given = sys.argv[1:]
    of_one = {"goes on": goes_on, "restored": restored}
    alone = {"rollout": rollout, "cut off": cut_off, "errors": errors}
    work = of_one[what](json.loads(given[0])) if given else alone[what]()
    sys.stdout.write(json.dumps(asyncio.run(work)) + "\n")


if __name__ == "__main__":
    main()
