"""A scripted model for the command `mini`, and an environment that kills its agent: each of four commands adds its number to
/workspace/log.

SNAPSHOTD_TEST_KILL, "before 3" or "after 3": SIGKILL at that point of that command; "slow 3": it takes a minute, once it has
written.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from minisweagent.models.test_models import DeterministicToolcallModel, make_toolcall_output

from snapshotd.integrations.mini_swe_agent import MiniEnvironment

STEPS = 4
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat log"


class Scripted(DeterministicToolcallModel):
    """Asks for the command that the conversation has not had yet."""

    def __init__(self, model_name: str, **kwargs: Any) -> None:
        calls = [f"echo {step} | tee -a log >&2" for step in range(1, STEPS + 1)] + [SUBMIT]
        outputs = [
            make_toolcall_output("", [{"id": f"call-{at}"}], [{"command": call, "tool_call_id": f"call-{at}"}])
            for at, call in enumerate(calls)
        ]
        super().__init__(outputs=outputs)

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
        self.current_index = sum(one.get("role") == "assistant" for one in messages) - 1
        return super().query(messages, **kwargs)


class Doomed(MiniEnvironment):
    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        point, _, step = os.environ.get("SNAPSHOTD_TEST_KILL", "").partition(" ")
        doomed = point and action["command"].startswith(f"echo {step} ")
        if doomed and point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if doomed and point == "slow":
            action = {**action, "command": f"{action['command']}; exec sleep 6061"}
            timeout = 100
        done = super().execute(action, cwd, timeout=timeout)
        if doomed and point == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done
