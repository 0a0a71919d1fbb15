"""An agent of mini-swe-agent, gone on with from the middle. The model is a script, so that this needs no key."""

import json
from pathlib import Path

from minisweagent.models.test_models import DeterministicModel, make_output

from snapshotd.client import Snapshot
from snapshotd.integrations.mini_swe_agent import MiniEnvironment, SnapshotdAgent

SAVED = Path("run.traj.json")
TEMPLATES = {"system_template": "You fix things.", "instance_template": "Please: {{task}}", "output_path": SAVED}
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def model(*commands: str) -> DeterministicModel:
    return DeterministicModel(outputs=[make_output("", [{"command": command}]) for command in commands])


agent = SnapshotdAgent(model("echo 1 > notes", "echo 2 >> notes", DONE), MiniEnvironment(), **TEMPLATES)
agent.run("note the steps")
calls = [
    one["extra"]["snapshot"] for one in json.loads(SAVED.read_text())["messages"][2:] if "snapshot" in one["extra"]
]
print([Snapshot.get(call).files.read_text("notes").split() for call in calls])

other = SnapshotdAgent(
    model("echo other >> notes; cat notes", DONE), MiniEnvironment(), resume=SAVED, resume_at=calls[0], **TEMPLATES
)
other.run("note the steps")
print([one["extra"]["raw_output"].split() for one in other.messages[2:] if "raw_output" in one["extra"]])
