"""An agent of deepagents, as its documentation writes one: argv is the prompt. Its tool `agent` is another agent."""

import subprocess
import sys

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


def agent(input: str) -> str:  # noqa: A002 - as the others name it
    """Explore a part."""
    return ask([bash], "You explore.", input)


def ask(tools: list, instructions: str, prompt: str) -> str:
    lead = create_deep_agent(model=ChatOpenAI(model="gpt-5"), tools=tools, system_prompt=instructions)
    return lead.invoke({"messages": [("user", prompt)]})["messages"][-1].content


sys.stdout.write(ask([bash, agent], "You lead.", sys.argv[1]) + "\n")
