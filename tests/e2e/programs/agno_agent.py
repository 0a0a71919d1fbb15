"""An agent of agno with OpenAI's responses, as its documentation writes one: argv is the prompt. Its tool `agent` is another agent."""

import subprocess
import sys

from agno.agent import Agent
from agno.models.openai import OpenAIResponses


def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


def agent(input: str) -> str:  # noqa: A002 - as the others name it
    """Explore a part."""
    return ask([bash], "You explore.", input)


def ask(tools: list, instructions: str, prompt: str) -> str:
    model = OpenAIResponses(id="gpt-5")
    return Agent(model=model, tools=tools, instructions=instructions, telemetry=False).run(prompt).content


sys.stdout.write(ask([bash, agent], "You lead.", sys.argv[1]) + "\n")
