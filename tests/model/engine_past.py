"""The walk's operations on the past: rewind in its three modes, undo, edit; and what a snapshot remembers.

A conversation is made by edits, which need no program in the sandbox. Each message is unlike any other, so what two
conversations share is what is equal at their beginning.
"""
# ruff: noqa: PT017 - errors are expected or not depending on what was killed

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from snapshotd.api.history import RewindMode
from snapshotd.client.results import TrajectoryInfo
from snapshotd.errors import Conflict, DataLoss, NotFound
from tests.model.engine_oracle import Line, Mind, Script, Taken, Tree, changes

if TYPE_CHECKING:
    from tests.model.engine_machine import Machine

UNDOABLE = ("rewind", "undo")


class Past:
    """See the module's text."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._client, self._world = machine, machine.client, machine.world

    def check_mind(self, item: Taken) -> None:
        """What is recorded with a snapshot, whatever became of its files."""
        said = tuple((message.role, message.content) for message in self._client.conversation(item.id))
        assert said == item.mind.said, f"said up to {item.id}: {said}, and should be {item.mind.said}"
        values = self._client.state(item.id)
        assert values == dict(item.mind.values), f"state of {item.id}: {values}, and should be {item.mind.values}"

    # -- rewind --------------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        m = self._machine
        line = m.line()
        target, mode = self._target_of(line)
        m.note(f"rewind {line.id[:12]} to {target.id[:12]} ({target.state}): {mode}")
        if mode != "files" and not self._world.in_history(line, target):
            self._refused(lambda: self._client.rewind(line.id, target.id, mode=mode), "not of its history")
            return
        if line.live_process and line.running:
            self._refused(lambda: self._client.rewind(line.id, target.id, mode=mode), "is live")
            return
        if m.rng.random() < 0.4:
            self._check_preview(line, target, mode)
        m.patient(lambda: self._client.rewind(line.id, target.id, mode=mode))
        line.running = True
        tree, mind = self._after(line, target, mode)
        self._settled(line, "rewind", tree, mind, target if mode != "conversation" else None)

    def crash_in_rewind(self) -> None:
        m = self._machine
        line = m.line()
        target, mode = self._target_of(line)
        if line.live_process or (mode != "files" and not self._world.in_history(line, target)):
            return self.crash_in_edit()
        m.note(f"rewind {line.id[:12]} to {target.id[:12]}: {mode}")
        tree, mind = self._after(line, target, mode)
        _, failure = m.kills.dying(lambda: self._client.rewind(line.id, target.id, mode=mode), 0.2)
        assert m.sync(line, {"rewind": tree}, {"rewind": mind}) or failure
        line.upper = set()
        return None

    def _target_of(self, line: Line) -> tuple[Taken, RewindMode]:
        """Conversations mostly go where they have been, and need no files there; files come from anywhere with the same
        image."""
        rng, world = self._machine.rng, self._world
        mode: RewindMode = rng.choice(("files", "conversation", "both"))
        image = world.snapshots[line.head].image
        found = [
            item
            for item in world.snapshots.values()
            if mode == "conversation" or (item.readable and item.image == image)
        ]
        if mode != "files" and rng.random() < 0.9:
            found = [item for item in found if world.in_history(line, item)]
        return rng.choice(found), mode

    def _after(self, line: Line, target: Taken, mode: RewindMode) -> tuple[Tree, Mind]:
        tree = line.tree if mode == "conversation" else target.tree
        return tree, self._world.snapshots[line.head].mind if mode == "files" else target.mind

    def _settled(self, line: Line, call: str, tree: Tree, mind: Mind, files_of: Taken | None) -> None:
        m = self._machine
        taken = m.sync(line, {call: tree}, {call: mind})
        assert taken
        assert taken[-1].tree is tree
        assert taken[-1].call == call
        if files_of is not None and files_of.times is not None:
            taken[-1].times = files_of.times
        self.check_mind(taken[-1])
        m.looks.check_running(line)
        if m.rng.random() < 0.3:
            m.looks.check_inside(line)

    def _check_preview(self, line: Line, target: Taken, mode: RewindMode) -> None:
        shown = self._machine.patient(lambda: self._client.preview_rewind(line.id, target.id, mode=mode))
        head = self._world.snapshots[line.head]
        files = {(c.change, c.path[11:]) for c in shown.changes if c.path.startswith("/workspace/")}
        wanted = set() if mode == "conversation" else changes(line.tree.listing(), target.tree.listing())
        assert files == wanted, f"too many: {files - wanted}; missing: {wanted - files}"
        here, there = head.mind.said, target.mind.said
        gone = () if mode == "files" else here[_common(here, there) :]
        assert tuple((message.role, message.content) for message in shown.messages) == gone, (shown.messages, gone)
        assert shown.effects == ()

    def _refused(self, work: Callable[[], object], why: str) -> None:
        try:
            work()
        except Conflict as exc:
            assert why in exc.message, exc
        else:
            raise AssertionError(f"it was done, though {why}")

    # -- undo ----------------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Everything is as it was before the last rewind; what is no rewind cannot be undone."""
        m = self._machine
        line = m.line()
        before = self._undone(line)
        m.note(f"undo in {line.id[:12]}: {before.id[:12] if before else 'nothing'}")
        if line.live_process and line.running:
            return self._refused(lambda: self._client.undo(line.id), "is live")
        if before is None:
            self._refused(lambda: self._client.undo(line.id), "nothing to undo")
            line.running = True
            return None
        if not before.readable:
            return self._undo_without_files(line, before)
        m.patient(lambda: self._client.undo(line.id))
        line.running = True
        return self._settled(line, "undo", before.tree, before.mind, before)

    def _undo_without_files(self, line: Line, before: Taken) -> None:
        try:
            self._client.undo(line.id)
        except (NotFound, DataLoss) as exc:
            assert "given up" in exc.message or "lost" in exc.message, exc
        else:
            raise AssertionError("files that are gone came back")
        line.running = True
        self._machine.sync(line, {})

    def crash_in_undo(self) -> None:
        m = self._machine
        line = m.line()
        before = self._undone(line)
        if line.live_process or before is None or not before.readable:
            return self.crash_in_rewind()
        m.note(f"undo in {line.id[:12]}")
        _, failure = m.kills.dying(lambda: self._client.undo(line.id), 0.2)
        assert m.sync(line, {"undo": before.tree}, {"undo": before.mind}) or failure
        line.upper = set()
        return None

    def _undone(self, line: Line) -> Taken | None:
        head = self._world.snapshots[line.head]
        if head.line != line.id or head.call not in UNDOABLE or head.parent is None:
            return None
        return self._world.snapshots[head.parent]

    # -- edit ----------------------------------------------------------------------------------------------------------

    def edit(self) -> None:
        m = self._machine
        if m.is_full():
            return m.remove()
        m.make_room()
        source = m.any_readable()
        change = Change(m, source)
        m.note(f"edit {source.id[:12]}: {change.kwargs}")
        made = m.patient(lambda: self._client.edit(source.id, **change.kwargs))
        line = self._adopt(source, change, made)
        self.check_mind(self._world.snapshots[line.head])
        if m.rng.random() < 0.4:
            m.looks.check_inside(line)
        if m.rng.random() < 0.3:
            m.looks.check_restored(self._world.snapshots[line.own[0]])
        return None

    def crash_in_edit(self) -> None:
        """The trajectory is there as it was forked, or as it was edited, or not."""
        m = self._machine
        if m.is_full():
            return m.kills.crash_in_remove()
        m.make_room()
        source = m.any_readable()
        change = Change(m, source)
        m.note(f"edit {source.id[:12]}: {change.kwargs}")
        made, failure = m.kills.dying(lambda: self._client.edit(source.id, **change.kwargs), 0.3)
        found = [t for t in self._client.trajectories() if t.id not in self._world.lines]
        assert len(found) <= 1
        assert found or failure is not None, made
        for item in found:
            line = self._adopt(source, change, item)
            line.running = False
            assert line.own or failure is not None, "an answered edit is not there"
        return None

    def _adopt(self, source: Taken, change: Change, made: TrajectoryInfo) -> Line:
        assert made.forked_from == source.id
        line = Line(made.id, source.id, source.id, source.tree)
        self._world.lines[line.id] = line
        self._machine.sync(line, {"edit": change.tree}, {"edit": change.mind})
        return line


def _common(a: tuple[tuple[str, str], ...], b: tuple[tuple[str, str], ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Change:
    """A random edit of a snapshot, and what it leads to."""

    def __init__(self, machine: Machine, source: Taken) -> None:
        rng = machine.rng
        script = Script(rng, source.tree, set())
        edits = script.edit(rng.choice((0, 1, 1, 2, 4)))
        self.tree = script.tree
        drop = rng.choice((0, 0, 1, rng.randrange(len(source.mind.said) + 1))) if source.mind.said else 0
        added = tuple(
            (rng.choice(("user", "assistant")), f"{rng.getrandbits(60):x}") for _ in range(rng.choice((0, 1, 2, 5)))
        )
        values = {rng.choice("abc"): rng.choice((None, rng.randrange(1000))) for _ in range(rng.choice((0, 1, 2)))}
        self.mind = source.mind.edited(drop, added, values)
        self.kwargs: dict[str, Any] = {
            "files": {f"/workspace/{path}".encode(): content for path, content in edits.items()},
            "drop_messages": drop,
            "add_messages": added,
            "state": values,
        }
        if rng.random() < 0.3:  # the same, told in another way
            del self.kwargs["drop_messages"], self.kwargs["add_messages"]
            self.kwargs["messages"] = self.mind.said
