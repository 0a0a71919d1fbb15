"""An agent of LangGraph with OpenAI's models, as its documentation writes one: argv is the prompt. Its tool `agent` is
another agent."""

import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


@tool
def agent(input: str) -> str:  # noqa: A002 - as the other SDK names it
    """Explore a part."""
    return ask([bash], "You explore.", input)


def ask(tools: list, instructions: str, prompt: str) -> str:
    graph = create_react_agent(ChatOpenAI(model="gpt-5"), tools, prompt=instructions)
    return graph.invoke({"messages": [("user", prompt)]})["messages"][-1].content


sys.stdout.write(ask([bash, agent], "You lead.", sys.argv[1]) + "\n")
