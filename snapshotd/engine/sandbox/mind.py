"""The agent's mind in a live sandbox, as far as no snapshot has it: its state, and its messages since the head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from snapshotd.types import Message


@dataclass(slots=True)
class UnsavedMind:
    """The mind of one sandbox, whose lock guards it."""

    state: dict[str, Any] = field(default_factory=dict)
    """The agent's state: `values` (its own JSON) and `tasks` (engine/mind/tasks.py). Replaced, never changed in
    place."""
    changed: bool = False
    """The next snapshot has to save the state."""
    messages: list[Message] = field(default_factory=list)
    """Messages of the conversation that the next snapshot will bind."""
    bytes: int = 0
    """Size of the messages that the agent appended since the head, as JSON."""

    def put(self, state: dict[str, Any], *, changed: bool) -> None:
        """Replace the state. `changed`: it is another one than the head's."""
        self.state, self.changed = state, changed

    def say(self, message: Message, size: int) -> None:
        """Append a message of the agent."""
        self.bytes += size
        self.messages.append(message)

    def saved(self, messages: int) -> None:
        """A snapshot has the state, and the first `messages` messages."""
        del self.messages[:messages]
        self.bytes, self.changed = 0, False
