"""The agent's own state of a sandbox: JSON values and subtasks, changed in memory and saved with the next snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import LimitExceeded

MAX_STATE_BYTES = 1 << 20

State = dict[str, Any]


def change_state(sandbox: Sandbox, change: Callable[[State], State]) -> None:
    """Replace the state by the result of `change`, whose values have gone through the funnel. LimitExceeded."""
    with sandbox.lock:
        state = change(sandbox.mind.state)
        size = len(json.dumps(state))
        if size > MAX_STATE_BYTES:
            raise LimitExceeded(
                f"the state would have {size} bytes, over the limit of {MAX_STATE_BYTES}; keep large values in files"
            )
        sandbox.mind.put(state, changed=True)
        sandbox.survival.set_state(sandbox.head, state)
