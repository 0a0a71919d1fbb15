"""Messages that a person adds where the conversation ends in a call whose result is not told yet.

The APIs of models refuse anything between a call and its result, and the program tells the result only when it goes on.
So these messages wait, in the marker of the edit, and join the conversation right behind the result, or before whatever
else the program says next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from snapshotd.engine.transfer.trajectories.reading import Spoken, spoken
from snapshotd.types import Message

KEY = "held"
"""Argument of an edit's marker: the messages, as pairs of role and content."""
LOOKED_AT = 200
"""The most messages behind a call among which its results are looked for."""


@dataclass(frozen=True, slots=True)
class HeldMessages:
    """`messages` wait until the calls in `unanswered` have their results."""

    messages: tuple[Message, ...] = ()
    unanswered: tuple[str, ...] = ()

    def around(self, message: Message) -> tuple[tuple[Message, ...], tuple[Message, ...], HeldMessages]:
        """The messages before and behind the one that the program says now, and the ones that are held then."""
        said = spoken(message) if self.messages else None
        if said is None:
            return (), (), self
        if not (said.results and self.unanswered):
            return self.messages, (), HeldMessages()
        left = _without(self.unanswered, said)
        return ((), (), HeldMessages(self.messages, left)) if left else ((), self.messages, HeldMessages())

    def behind(self, recorded: Sequence[Message]) -> HeldMessages:
        """The messages that are held after these of the conversation."""
        held = self
        for number, message in enumerate(recorded):
            if not held.messages:
                break
            if not held.unanswered and message == held.messages[0]:
                return HeldMessages()
            _, after, then = held.around(message)
            joined = tuple(recorded[number + 1 : number + 1 + len(after)]) == after
            held = then if joined else HeldMessages(after)
        return held


def unanswered(messages: Iterable[Message]) -> tuple[str, ...]:
    """The calls at the end of a conversation that have no result there."""
    found: tuple[str, ...] = ()
    for message in messages:
        said = spoken(message)
        left = _without(found, said) if said.results else ()
        found = tuple(call.id for call in said.calls) or left
    return found


def is_result(message: Message) -> bool:
    return bool(spoken(message).results)


def messages_in(arguments: Any) -> tuple[Message, ...]:
    """The messages that an edit's marker holds."""
    pairs = arguments.get(KEY, ()) if isinstance(arguments, dict) else ()
    return tuple(Message(role, content) for role, content in pairs)


def _without(calls: tuple[str, ...], said: Spoken) -> tuple[str, ...]:
    """The calls without the ones that have a result here. A result that names no known call is of the first."""
    left = list(calls)
    for result in said.results:
        if left:
            left.remove(result.id if result.id in left else left[0])
    return tuple(left)
