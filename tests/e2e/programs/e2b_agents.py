"""OpenAI's Agents SDK with its own E2B client: an agent with a scripted model works in a sandbox, whose id is printed, and
goes on in it in a second run. Everything is as their pages have it."""

import asyncio
import json
import sys

from agents import RunConfig, Runner
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.testing import ScriptedModel, assistant_message, function_call


def call(number: int, command: str) -> list:
    return [function_call("exec_command", {"cmd": command, "login": False}, call_id=f"call_{number}")]


async def main() -> None:
    client = E2BSandboxClient()
    options = E2BSandboxClientOptions(
        "e2b", template="base", timeout=300, allow_internet_access=False, workspace_persistence="snapshot"
    )
    session = await client.create(options=options)
    async with session:
        model = ScriptedModel(
            [
                call(1, "echo one > notes && cat notes"),
                call(2, "false"),
                call(3, "cat notes; echo two >> notes"),
                [assistant_message("Done.")],
            ]
        )
        agent = SandboxAgent(name="worker", instructions="Work.", model=model)
        config = RunConfig(sandbox=SandboxRunConfig(client=client, session=session), tracing_disabled=True)
        result = await Runner.run(agent, "Take notes.", run_config=config)
        assert result.final_output == "Done.", result.final_output
        outputs = [str(item.output) for item in result.new_items if item.type == "tool_call_output_item"]
        assert len(outputs) == 3, outputs
        assert "one" in outputs[0], outputs
        assert "one" in outputs[2], outputs
        sys.stdout.write(json.dumps({"sandbox": session.state.sandbox_id, "root": str(session.state.manifest.root)}))
    await client.delete(session)


asyncio.run(main())
