"""An agent of Strands, as its documentation writes one: argv is the prompt. Its tool `agent` is another agent."""

import subprocess
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


@tool
def agent(input: str) -> str:  # noqa: A002 - as the others name it
    """Explore a part."""
    return ask([bash], "You explore.", input)


def ask(tools: list, instructions: str, prompt: str) -> str:
    model = OpenAIModel(model_id="gpt-5")
    return str(Agent(model=model, tools=tools, system_prompt=instructions, callback_handler=None)(prompt))


sys.stdout.write(ask([bash, agent], "You lead.", sys.argv[1]))
