"""What is noted of a sandbox for the daemon that comes next, and what that one makes of it."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.engine.journal.pending import Pending
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord, Root, Survival
from snapshotd.engine.sandbox.sandbox import Sandbox, UnsavedMind
from snapshotd.errors import Conflict, LimitExceeded, NotFound
from snapshotd.types import (
    CallID,
    EntryKind,
    ImageID,
    JournalEntry,
    LayerID,
    Message,
    SideEffect,
    SnapshotID,
    Stack,
    new_id,
)

HEAD, NEXT = SnapshotID("a" * 32), SnapshotID("b" * 32)


@pytest.fixture
def record(tmp_path: Path) -> LiveRecord:
    made = LiveRecord(tmp_path / "live" / "container")
    made.open()
    return made


def _root(mount_id: int, *, lazy: bool = False) -> Root:
    stack = Stack(ImageID(new_id()), (LayerID(new_id()), LayerID(new_id())))
    return Root(mount_id, LayerID(new_id()), stack, HEAD, 1, HEAD, lazy)


def _sandbox(record: LiveRecord, head: SnapshotID = HEAD) -> Any:
    survival = Survival()
    survival.use(record)
    return SimpleNamespace(lock=threading.RLock(), survival=survival, head=head, mind=UnsavedMind())


def _pending(sandbox: Any) -> Pending:
    return Pending(cast("Sandbox", sandbox))


def _entry(name: str, kind: EntryKind = EntryKind.TOOL, **more: Any) -> JournalEntry:
    return JournalEntry(CallID(new_id()), kind, name, {"n": 1}, HEAD, 1_000, **more)


def _restored(
    record: LiveRecord, head: SnapshotID, entries: tuple[JournalEntry, ...] = (), known: frozenset[str] = frozenset()
) -> tuple[Any, Pending]:
    sandbox = _sandbox(record, head)
    pending = _pending(sandbox)
    pending.restore(record, head, entries, (known | {entry.id for entry in entries}).__contains__)
    return sandbox, pending


def test_the_roots(record: LiveRecord) -> None:
    assert live.read(record.directory) is None
    roots = [_root(7), _root(8, lazy=True)]
    record.keep({"trajectory": "t"}, roots)
    assert live.read(record.directory) == ({"trajectory": "t"}, roots)
    record.forget()
    assert live.read(record.directory) is None
    record.keep({"trajectory": "t"}, roots[1:])
    record.remove()
    record.remove()
    assert not record.directory.exists()


def test_another_version_is_not_understood(record: LiveRecord) -> None:
    record.keep({}, [_root(7)])
    text = (record.directory / "sandbox.json").read_text()
    (record.directory / "sandbox.json").write_text(text.replace('"version":1', '"version":2'))
    assert live.read(record.directory) is None


def test_half_a_line_is_not_there(record: LiveRecord) -> None:
    record.note(HEAD, {"fact": 1})
    with open(record.directory / "pending.ndjson", "ab") as file:
        file.write(b'{"head":"aaa')
    assert list(live.pending(record.directory, HEAD)) == [{"head": HEAD, "fact": 1}]


def test_a_record_that_cannot_be_written_is_given_up(record: LiveRecord) -> None:
    record.keep({}, [_root(7)])
    for path in record.directory.iterdir():
        path.unlink()
    record.directory.rmdir()
    record.keep({}, [_root(8)])
    assert not record.kept
    record.note(HEAD, {"fact": 1})
    record.set_state(HEAD, {})
    record.drop_bound(NEXT, {})
    record.note_wire({})
    assert not record.directory.exists()


def test_messages_and_state(record: LiveRecord) -> None:
    pending = _pending(_sandbox(record))
    pending.add_message(Message("user", {"a": "ä\udc80"}))
    pending.add_message(Message("assistant", "once"), rid="1" * 16)
    pending.add_message(Message("assistant", "once"), rid="1" * 16)
    record.set_state(HEAD, {"values": {"k": 1}})
    sandbox, restored = _restored(record, HEAD)
    assert sandbox.mind.messages == [Message("user", {"a": "ä\udc80"}), Message("assistant", "once")]
    assert sandbox.mind.bytes > 0
    assert (sandbox.mind.state, sandbox.mind.changed) == ({"values": {"k": 1}}, True)
    restored.add_message(Message("assistant", "once"), rid="1" * 16)
    assert len(sandbox.mind.messages) == 2, "sent again to the next daemon"
    sandbox, _ = _restored(record, NEXT)
    assert (sandbox.mind.messages, sandbox.mind.changed) == ([], False), "a snapshot has bound it"


def test_values_go_with_the_next_entry_alone(record: LiveRecord) -> None:
    pending = _pending(_sandbox(record))
    assert pending.add_fact("now", 1, "1" * 16) == 1
    assert pending.add_fact("now", 2, "1" * 16) == 1, "the same request"
    recorded: list[JournalEntry] = []
    first = _entry("first", facts=({"kind": "own", "value": 0},))
    pending.begin(first, recorded.append)
    assert recorded[0].facts == ({"kind": "now", "value": 1}, {"kind": "own", "value": 0})
    pending.add_fact("now", 3, "2" * 16)

    def refused(_: JournalEntry) -> None:
        raise Conflict("not now")

    with pytest.raises(Conflict):
        pending.begin(_entry("second"), refused)
    _, restored = _restored(record, HEAD, (first,))
    third: list[JournalEntry] = []
    assert restored.find_answer("2" * 16) == (3,)
    restored.begin(_entry("third"), third.append)
    assert third[0].facts == ({"kind": "now", "value": 3},)


def test_a_daemon_that_dies_while_it_records_an_intent(record: LiveRecord) -> None:
    """Whether the values went with it is what the catalog says."""
    pending = _pending(_sandbox(record))
    pending.add_fact("now", 1, None)
    entry = _entry("call")

    class Died(BaseException):
        pass

    def die(_: JournalEntry) -> None:
        raise Died

    with pytest.raises(Died):
        pending.begin(entry, die)
    for known, left in ((frozenset({entry.id}), ()), (frozenset(), ({"kind": "now", "value": 1},))):
        _, restored = _restored(record, HEAD, (), known)
        recorded: list[JournalEntry] = []
        restored.begin(_entry("next"), recorded.append)
        assert recorded[0].facts == left


def test_calls_wait_for_their_process(record: LiveRecord) -> None:
    pending = _pending(_sandbox(record))
    task = _entry("build", EntryKind.TASK, facts=({"kind": "uuid", "value": "u"},))
    call = _entry("call", side_effect=SideEffect.IRREVERSIBLE)
    pending.begin(task, lambda _: pytest.fail("a task is recorded when it ends"))
    pending.begin(call, lambda _: None)
    pending.add_message(Message("assistant", "in it"), within=call.id)
    _, restored = _restored(record, HEAD, (call,))
    for entry in (task, call):
        opened = restored.find_open(entry.id)
        assert opened is not None
        assert (opened.entry.kind, opened.entry.name, opened.entry.arguments) == (
            entry.kind,
            entry.name,
            entry.arguments,
        )
    assert restored.claim([call.id, "f" * 32]) == {call.id}
    assert restored.claim([call.id]) == set(), "it is somebody's now"
    assert restored.close(call.id).said == 1
    with pytest.raises(NotFound):
        restored.close(call.id)
    assert restored.claim([task.id]) == {task.id}


def test_what_a_snapshot_does_not_bind(record: LiveRecord) -> None:
    sandbox = _sandbox(record)
    pending = _pending(sandbox)
    task, call = _entry("build", EntryKind.TASK), _entry("call")
    pending.begin(task, lambda _: None)
    pending.begin(call, lambda _: None)
    pending.add_message(Message("assistant", "bound"), within=call.id, rid="3" * 16)
    pending.add_fact("now", 5, "4" * 16)
    record.note(NEXT, sandbox.survival.residue())  # before the commit
    record.drop_bound(NEXT, sandbox.survival.residue())
    restored_sandbox, restored = _restored(record, NEXT, (call,))
    assert restored_sandbox.mind.messages == []
    assert restored.find_answer("4" * 16) == (5,)
    restored.add_message(Message("assistant", "bound"), rid="3" * 16)
    assert restored_sandbox.mind.messages == []
    assert restored.close(call.id).said == 1
    assert restored.close(task.id).entry.name == "build"


def test_the_notes_do_not_grow(record: LiveRecord) -> None:
    sandbox = _sandbox(record)
    pending = _pending(sandbox)
    pending.begin(_entry("build", EntryKind.TASK), lambda _: None)
    for number in range(64):
        pending.add_message(Message("assistant", "x" * 50_000))
        sandbox.mind.drop_saved(1)
        sandbox.head = SnapshotID(f"{number:032x}")
        record.note(sandbox.head, sandbox.survival.residue())
        record.drop_bound(sandbox.head, sandbox.survival.residue())
    assert (record.directory / "pending.ndjson").stat().st_size < 2 << 20
    _, restored = _restored(record, sandbox.head)
    assert len(restored.unclaimed) == 1


def test_limits(record: LiveRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = _pending(_sandbox(record))
    monkeypatch.setattr("snapshotd.engine.journal.pending.MAX_OPEN_CALLS", 1)
    monkeypatch.setattr("snapshotd.engine.journal.pending.MAX_FACTS", 1)
    monkeypatch.setattr("snapshotd.engine.journal.pending.MAX_PENDING_BYTES", 10)
    pending.begin(_entry("one"), lambda _: None)
    pending.add_fact("now", 1, None)
    with pytest.raises(LimitExceeded):
        pending.begin(_entry("two"), lambda _: None)
    with pytest.raises(LimitExceeded):
        pending.add_fact("now", 2, None)
    with pytest.raises(LimitExceeded):
        pending.add_message(Message("user", "a text of more than ten bytes"))
    monkeypatch.setattr("snapshotd.engine.sandbox.live.MAX_PENDING_BYTES", 10)
    record.keep({}, [_root(1)])
    monkeypatch.setattr("snapshotd.engine.journal.pending.MAX_FACTS", 2)
    pending.add_fact("now", 2, None)
    assert not record.kept, "more than is kept for another daemon"


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_newest_facts_are_read_on_any_file_system(
    record: LiveRecord, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "this file system cannot let names change places")

    if not exchanges:
        monkeypatch.setattr(live.files, "exchange", refuse)
    for number in range(3):
        record.keep({"number": number}, (_root(number),))
        facts, (root,) = _read(record)
        assert (facts["number"], root.mount_id) == (number, number)


def _read(record: LiveRecord) -> tuple[dict[str, Any], list[Root]]:
    found = live.read(record.directory)
    assert found is not None
    return found
