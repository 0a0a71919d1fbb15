"""An agent of Pydantic AI, as its documentation writes one: argv is the prompt. Its tool `agent` is another agent."""

import subprocess
import sys

from pydantic_ai import Agent


def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


async def agent(input: str) -> str:  # noqa: A002 - as the others name it
    """Explore a part."""
    return (await Agent("openai-chat:gpt-5", tools=[bash], instructions="You explore.").run(input)).output


lead = Agent("openai-chat:gpt-5", tools=[bash, agent], instructions="You lead.")
sys.stdout.write(lead.run_sync(sys.argv[1]).output + "\n")
