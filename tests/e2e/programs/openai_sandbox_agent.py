"""A sandbox agent of the OpenAI Agents SDK with a scripted model: six calls, each of which adds its number to /workspace/log
and writes a file.

    openai_sandbox_agent.py THREAD POINT STEP

It kills itself with SIGKILL at POINT of call STEP: model (before the call), in, after (the call was made, and nothing is
stored of it), or never.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agents import RunConfig, Runner, set_tracing_disabled
from agents.items import ModelResponse
from agents.sandbox import SandboxAgent
from agents.sandbox.capabilities import Shell
from agents.testing.model import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from agents.usage import Usage

from snapshotd.integrations.openai_agents import SnapshotdOptions, SnapshotdSandboxSession, SnapshotdThread

STEPS = 6
set_tracing_disabled(True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def agent(point: str = "never", at: int = 0, *, asks_at: int = 0) -> SandboxAgent[Any]:
    """It asks a person before call number `asks_at`."""

    def respond(call: ModelCall) -> Any:
        items = [{"type": "message"}] if isinstance(call.input, str) else call.input
        step = sum(item.get("type") == "function_call_output" for item in items) + 1
        if step > STEPS:
            return ModelResponse(output=[assistant_message("done")], usage=Usage(), response_id=None)
        if (point, at) == ("model", step):
            die()
        script = f"echo {step} >> log; echo did {step} | tee step-{step}"
        if (point, at) == ("in", step):
            script += "; sleep 100"
        asked = function_call("exec_command", {"cmd": script}, call_id=f"call-{step}")
        return ModelResponse(output=[asked], usage=Usage(), response_id=None)

    def configure(tools: Any) -> None:
        async def needs(_context: Any, arguments: Any, call_id: str) -> bool:
            return call_id == f"call-{asks_at}"

        tools.exec_command.needs_approval = needs

    run = SnapshotdSandboxSession.exec

    async def exec_and_die(self: Any, *command: Any, **more: Any) -> Any:
        doomed = f"echo {at} >> log" in str(command)
        if doomed and point == "in":
            asyncio.get_running_loop().create_task(die_once_there(self))
        done = await run(self, *command, **more)
        if doomed and point == "after":
            die()
        return done

    async def die_once_there(session: Any) -> None:
        while not await session.box.files.exists(f"step-{at}"):
            await asyncio.sleep(0.01)
        die()

    if point in ("in", "after"):
        SnapshotdSandboxSession.exec = exec_and_die  # type: ignore[method-assign]
    model = ScriptedModel(ModelStep.respond(respond) for _ in range(100))
    return SandboxAgent("coder", model=model, capabilities=[Shell(configure_tools=configure)])


def thread_of(identity: str, **options: Any) -> SnapshotdThread:
    return SnapshotdThread(identity, options=SnapshotdOptions(runtime="runc", **options))


async def main() -> None:
    name, point, step = sys.argv[1:]
    thread = thread_of(name)
    wish: Any = "please" if not await thread.get_items() else []
    done = await Runner.run(
        agent(point, int(step)), wish, session=thread, run_config=RunConfig(sandbox=thread.sandbox), max_turns=20
    )
    Path("/dev/stdout").write_text(json.dumps([done.final_output, await thread.snapshot()]))


if __name__ == "__main__":
    asyncio.run(main())
