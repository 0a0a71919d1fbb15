"""The conversation, recorded values and state of one sandbox, as its program says and hears them. In a replay the
program's words are matched with the recorded ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.journal import tasks
from snapshotd.engine.journal.agent_state import State, change_state
from snapshotd.engine.journal.recorder import Recorder
from snapshotd.engine.journal.retracing import NoReplay
from snapshotd.types import Message


class ProgramConversation:
    """Thread-safe. The program's side is plain, the records have gone through the funnel."""

    def __init__(self, catalog: Catalog, recorder: Recorder, replay: NoReplay) -> None:
        self._catalog, self._recorder, self._replay = catalog, recorder, replay
        self._funnel, self._sandbox, self._pending = recorder.funnel, recorder.sandbox, recorder.pending

    def record_fact(self, kind: str, value: Any, rid: str | None = None) -> Any:
        """See `AgentHandler.fact`."""
        known = self.find_fact(kind)
        if known is not None:
            return known[0]
        return self._funnel.reveal(self._pending.add_fact(kind, self._funnel.conceal(value), rid))

    def find_fact(self, kind: str, rid: str | None = None) -> tuple[Any] | None:
        """A value that is recorded here, or was for this very request, as a one-element tuple; None where none is."""
        with self._replay.lock:
            known = self._replay.take_fact(kind) if self._replay.replaying else self._pending.find_answer(rid)
        return None if known is None else (self._funnel.reveal(known[0]),)

    def add(self, message: Message, within: str | None = None, rid: str | None = None) -> None:
        """Append to the conversation; in a replay, match the recorded message. Messages of a
        person that waited for it are appended, too. `within`: the running call that sends
        it. A replay does not run that call again, so the call counts its messages."""
        message = self._conceal(message)
        with self._replay.lock:
            self._recorder.check()
            if self._replay.meet(message):
                return
            before, after = self._replay.take_around(message)
        for one in before:
            self._pending.add_message(one, within)
        self._pending.add_message(message, within, rid)
        for one in after:
            self._pending.add_message(one, within)

    def meet(self, messages: Sequence[Message]) -> None:
        """Take messages of a replayed program, read from the wire, as said. They are appended where the conversation
        does not hold them yet: no snapshot had bound them at the end, or the program has just gone live."""
        with self._replay.lock, self._sandbox.lock:
            for message in self._replay.skip(messages):
                self._pending.add_message(self._conceal(message))

    def page(self, offset: int, limit: int) -> list[Message]:
        """A part of the conversation as the program knows it."""
        with self._replay.lock, self._sandbox.lock:
            recorded: Iterable[Message] = ()
            known = self._replay.known_count()
            if offset < known:
                recorded = self._replay.known_messages(offset)
            pending = tuple(self._sandbox.mind.messages)[max(0, offset - known) :]
            found = list(itertools.islice(itertools.chain(recorded, pending), limit))
        return self._reveal(found)

    def newest(self, limit: int) -> list[Message]:
        """The last messages up to the head, as the program knows them."""
        with self._sandbox.lock:
            first = max(0, self._sandbox.writer.messages - limit)
        return self._reveal(self._catalog.conversations.read(self._sandbox.head, first))

    def values(self) -> dict[str, Any]:
        """The values of the agent's state, as the program knows them."""
        values: dict[str, Any] = self._funnel.reveal(self._sandbox.mind.state.get("values", {}))
        return values

    def set_value(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        """See `AgentHandler.state_set`. LimitExceeded."""
        self._recorder.check()
        self._pending.mark_beyond(within)
        key = self._funnel.conceal_text(key)

        def with_value(state: State) -> State:
            values = {name: old for name, old in state.get("values", {}).items() if name != key}
            if value is not None:
                values[key] = self._funnel.conceal(value[0])
            return {**state, "values": values}

        change_state(self._sandbox, with_value)

    def set_task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> str:
        """Declare or change a subtask, and return its status now. Errors: as `tasks.change`."""
        self._recorder.check()
        conceal, at = self._funnel.conceal, self._replay.place()
        name, needs, note = conceal(name), tuple(conceal(list(depends))), conceal(note)
        change_state(self._sandbox, lambda state: tasks.change(state, name, status, needs or None, note, at))
        return str(tasks.find(self._sandbox.mind.state, name).status)

    def tasks(self) -> list[dict[str, Any]]:
        """All subtasks, as the program knows them."""
        return list(self._funnel.reveal(list(self._sandbox.mind.state.get("tasks", ()))))

    def _conceal(self, message: Message) -> Message:
        return Message(self._funnel.conceal_text(message.role), self._funnel.conceal(message.content))

    def _reveal(self, messages: Iterable[Message]) -> list[Message]:
        return [Message(message.role, self._funnel.reveal(message.content)) for message in messages]
