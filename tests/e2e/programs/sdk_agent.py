"""An agent of OpenAI's Agents SDK, as its documentation writes one: argv is the prompt. Its tool `agent` is another agent."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
async def bash(command: str) -> str:
    """Run a command."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return f"exit code {process.returncode}: {output.decode()}"


set_tracing_disabled(True)
helper = Agent(name="helper", instructions="You explore.", tools=[bash], model="gpt-5")
explore = helper.as_tool(tool_name="agent", tool_description="Explore a part.")
lead = Agent(name="lead", instructions="You lead.", tools=[bash, explore], model="gpt-5")
sys.stdout.write(f"{Runner.run_sync(lead, sys.argv[1]).final_output}\n")
