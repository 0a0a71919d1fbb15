"""A conversation with its files: run it again, and it goes on. The model is a script, so that this needs no key."""

import asyncio

from agents import RunConfig, Runner, set_tracing_disabled
from agents.sandbox import SandboxAgent
from agents.testing.model import ScriptedModel, assistant_message, function_call

from snapshotd.integrations.openai_agents import SnapshotdThread

CALL = function_call("exec_command", {"cmd": "date >> visits; wc -l < visits"}, call_id="call-1")


async def main() -> None:
    set_tracing_disabled(True)
    agent = SandboxAgent("coder", model=ScriptedModel([[CALL], [assistant_message("Done.")]]))

    thread = SnapshotdThread("ann")
    await Runner.run(agent, "Note my visit.", session=thread, run_config=RunConfig(sandbox=thread.sandbox))

    output = [item["output"] for item in await thread.get_items() if item.get("type") == "function_call_output"][-1]
    print(output.split("Output:")[-1].strip(), "visit(s);", len(await thread.get_items()), "items")


asyncio.run(main())
