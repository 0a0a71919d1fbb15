"""An agent of smolagents, as its documentation writes one: argv is the prompt. Its tool `agent` is another agent. With
`code` in the environment variable MANNER, the model's words are the code that it runs."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

KIND = CodeAgent if os.environ.get("MANNER") == "code" else ToolCallingAgent


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: The command.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    return f"exit code {done.returncode}: {done.stdout}{done.stderr}"


@tool
def agent(input: str) -> str:  # noqa: A002 - as the others name it
    """Explore a part.

    Args:
        input: The part.
    """
    return ask([bash], input)


def ask(tools: list, prompt: str) -> str:
    model = OpenAIModel(model_id="gpt-5", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return str(KIND(tools=tools, model=model, verbosity_level=0).run(prompt))


sys.stdout.write(ask([bash, agent], sys.argv[1]) + "\n")
