"""A crew of CrewAI, as its documentation writes one: argv is the prompt. Its tool `agent` is another crew."""

import os
import subprocess
import sys

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", OTEL_SDK_DISABLED="true")

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("bash")
def bash(command: str) -> str:
    """Run a command."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


@tool("agent")
def agent(input: str) -> str:  # noqa: A002 - as the others name it
    """Explore a part."""
    return ask([bash], "explorer", input)


def ask(tools: list, role: str, prompt: str) -> str:
    member = Agent(role=role, goal="To do it.", backstory="A person.", llm=LLM(model="openai/gpt-5"), tools=tools)
    task = Task(description=prompt, expected_output="A word.", agent=member)
    return str(Crew(agents=[member], tasks=[task]).kickoff())


sys.stdout.write(ask([bash, agent], "lead", sys.argv[1]) + "\n")
