"""A task of Inspect AI with a mock model, whose tool runs commands in our sandbox: inspect_agent.py LOG_DIR [SNAPSHOT]. It prints
JSON: for each call what the sample's log says of its snapshot."""

from __future__ import annotations

import json
import sys

from inspect_ai import Task, eval  # noqa: A004 - Inspect's name
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import basic_agent
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec

from snapshotd.integrations.inspect_ai import SnapshotdConfig

STEPS = 3


def main() -> None:
    log_dir, *snapshot = sys.argv[1:]
    calls = [
        ModelOutput.for_tool_call("mockllm", "bash", {"command": f"echo {step} >> log; cat log"})
        for step in range(1, STEPS + 1)
    ]
    submit = ModelOutput.for_tool_call("mockllm", "submit", {"answer": "done"})
    for output in (*calls, submit):
        output.usage = ModelUsage(
            input_tokens=1, output_tokens=1, total_tokens=2
        )  # else it is counted with a file from the network
    config = SnapshotdConfig(runtime="runc", snapshot=snapshot[0] if snapshot else None)
    task = Task(
        dataset=[Sample(input="please", target="done", files={"given": "data:text/plain;base64,MQ=="})],
        solver=basic_agent(tools=[bash()]),
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("snapshotd", config),
    )
    (log,) = eval(
        task, model=get_model("mockllm/model", custom_outputs=[*calls, submit]), log_dir=log_dir, display="none"
    )
    assert log.status == "success", log.error
    assert log.samples is not None
    events = [event for event in log.samples[0].events if event.event == "info" and event.source == "snapshotd"]
    outputs = [message.text for message in log.samples[0].messages if message.role == "tool"]
    sys.stdout.write(json.dumps({"told": [event.data for event in events], "outputs": outputs}) + "\n")


if __name__ == "__main__":
    main()
