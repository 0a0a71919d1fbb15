"""The agent's own state of a sandbox: JSON values and subtasks, changed in memory and saved with the next snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from snapshotd.engine.journal import tasks
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import LimitExceeded
from snapshotd.secrets.redactor import Funnel
from snapshotd.types import SnapshotID

MAX_STATE_BYTES = 1 << 20

State = dict[str, Any]


class AgentState:
    """Thread-safe. The stored values have gone through the funnel."""

    def __init__(self, sandbox: Sandbox, funnel: Funnel) -> None:
        self._sandbox, self._funnel = sandbox, funnel

    def values(self) -> dict[str, Any]:
        """The values, as the program knows them."""
        values: dict[str, Any] = self._funnel.reveal(self._sandbox.mind.state.get("values", {}))
        return values

    def set_value(self, key: str, value: tuple[Any] | None) -> None:
        """See `AgentHandler.state_set`. LimitExceeded."""
        concealed = self._funnel.conceal_text(key)

        def with_value(state: State) -> State:
            values = {name: old for name, old in state.get("values", {}).items() if name != concealed}
            if value is not None:
                values[concealed] = self._funnel.conceal(value[0])
            return {**state, "values": values}

        self.change(with_value)

    def set_task(
        self, name: str, status: str, depends: tuple[str, ...], note: str | None, at: SnapshotID
    ) -> dict[str, Any]:
        """Declare or change a subtask, at a snapshot, and return it. Errors: as `tasks.change`."""
        self.change(lambda state: tasks.change(state, name, status, depends or None, note, at))
        return next(task for task in self._sandbox.mind.state["tasks"] if task["name"] == name)

    def change(self, change: Callable[[State], State]) -> None:
        """Replace the state by the result of `change`. LimitExceeded."""
        with self._sandbox.lock:
            state = change(self._sandbox.mind.state)
            size = len(json.dumps(state))
            if size > MAX_STATE_BYTES:
                raise LimitExceeded(
                    f"the state would have {size} bytes, over the limit of {MAX_STATE_BYTES}; keep large values in files"
                )
            self._sandbox.mind.put(state, changed=True)
            self._sandbox.survival.set_state(self._sandbox.head, state)
