"""`SnapshotdSaver` in a file: the answers are those of LangGraph's SQLite saver, in a fraction of its bytes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from snapshotd.errors import Conflict, DataLoss, NotFound, UsageError, VersionMismatch
from snapshotd.integrations.langgraph import SnapshotdSaver
from snapshotd.integrations.langgraph.file import FORM
from snapshotd.sqlite import Database
from tests import long
from tests.langgraph_rig import Cipher, checkpoint, config, converse, messages, size_of, sqlite_saver

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@pytest.fixture
def saver(path: Path) -> Iterator[SnapshotdSaver]:
    with SnapshotdSaver(path) as saver:
        yield saver


# -- the same answers as LangGraph's own -------------------------------------------------------------------------------


def random_history(saver: BaseCheckpointSaver[Any], seed: int) -> None:
    """Threads with namespaces, forks, changed and unchanged channels, writes before and after their checkpoint, and
    checkpoints that are stored twice. The same for each saver, with the ids of the first one."""
    draw = random.Random(seed)
    said = messages(30, seed)
    made: list[Any] = []
    for number in range(40):
        thread, ns = draw.choice("ab"), draw.choice(["", "", "child:1"])
        mine = [
            at for at in made if at["configurable"]["thread_id"] == thread and at["configurable"]["checkpoint_ns"] == ns
        ]
        parent = draw.choice(mine) if mine and draw.random() < 0.3 else mine[-1] if mine else config(thread, ns=ns)
        count = draw.randrange(len(said))
        values = {
            "messages": said[:count] if draw.random() < 0.7 else said[draw.randrange(10) : count],
            "text": "x" * draw.randrange(3000),
            "small": [draw.randrange(9) for _ in range(draw.randrange(200))],
            "nested": {"list": said[:3], "set": {1, 2}, "none": None, "bytes": b"\0\xff" * draw.randrange(99)},
        }
        if draw.random() < 0.3:
            del values["text"]
        state = checkpoint(values, dict.fromkeys(values, number + 1))
        state["id"] = f"{number:08}-{draw.randrange(10**6)}"
        task = f"task-{draw.randrange(3)}"
        early = {"configurable": {**parent["configurable"], "checkpoint_id": state["id"]}}
        if draw.random() < 0.5:
            saver.put_writes(
                early, [("messages", said[count : count + 1]), (INTERRUPT, number)], task, f"~{number % 3}"
            )
        metadata: Any = {
            "source": draw.choice(["loop", "input"]),
            "step": number,
            "run_id": f"run-{number % 4}",
            "a": None,
        }
        at = saver.put(parent, state, metadata, dict.fromkeys(values, number + 1))
        made.append(at)
        saver.put_writes(at, [("text", number), ("messages", said[-1:])], task, "~1")
        if draw.random() < 0.3:
            saver.put_writes(at, [(ERROR, f"error {number}")], task)
        if draw.random() < 0.2:
            saver.put(parent, {**state, "ts": "later"}, metadata, {})


def everything(saver: BaseCheckpointSaver[Any]) -> Any:
    """What a caller can see of it."""
    wanted: list[Any] = [
        {"source": "input"},
        {"step": 7},
        {"source": "loop", "run_id": "run-1"},
        {"a": None},
        {"none": 1},
    ]
    found: list[Any] = [list(saver.list(None)), *(list(saver.list(config("a"), filter=each)) for each in wanted)]
    found += [list(saver.list({"configurable": {"thread_id": "a"}}, limit=limit)) for limit in (1, 3, 20)]
    for one in found[0][:5]:
        found += [list(saver.list(None, before=one.config, limit=4)), saver.get_tuple(one.config)]
        found.append(list(saver.list(one.config)))
        found.append(saver.get_delta_channel_history(config=one.config, channels=["messages", "text", "no"]))
    return found + [saver.get_tuple(config(thread, ns=ns)) for thread in "abc" for ns in ("", "child:1")]


@pytest.mark.parametrize("seed", long.seeds(2, 40))
def test_it_answers_as_the_sqlite_saver_does(path: Path, tmp_path: Path, seed: int) -> None:
    with sqlite_saver(tmp_path / "other.db") as other, SnapshotdSaver(path) as saver:
        random_history(other, seed)
        random_history(saver, seed)
        expected = everything(other)
        assert everything(saver) == expected
        with SnapshotdSaver(path) as again:
            assert everything(again) == expected
        saver.copy_thread("a", "copy")
        saver.delete_thread("b")
        other.delete_thread("b")
        saver.delete_thread("copy")
        assert everything(saver) == everything(other)


def test_a_copy_of_a_thread_outlives_it_and_shares_its_bytes(saver: SnapshotdSaver) -> None:
    said = messages(40)
    converse(saver, said)
    before = [found[1:] for found in saver.list(config("talk"))]
    pieces = saver._all.db.read("SELECT count(*) FROM piece")
    saver.copy_thread("talk", "copy")
    assert saver._all.db.read("SELECT count(*) FROM piece") == pieces
    saver.delete_thread("talk")
    copied = list(saver.list(config("copy")))
    assert [(found.checkpoint, found.metadata) for found in copied] == [found[:2] for found in before]
    assert [found.parent_config for found in copied[:-1]] == [found.config for found in copied[1:]]
    saver.put_writes(copied[0].config, [("messages", said[:1])], "task")
    assert [write[1:] for write in saver.get_tuple(config("copy")).pending_writes or []] == [("messages", said[:1])]  # type: ignore[union-attr]
    with pytest.raises(NotFound, match="'none'"):
        saver.copy_thread("none", "other")
    converse(saver, said[:2], "busy")
    with pytest.raises(Conflict, match="'busy'"):
        saver.copy_thread("copy", "busy")
    for thread in ("copy", "busy"):
        saver.delete_thread(thread)
    for table in ("thread", "space", "family", "checkpoint", "writes", "piece", "recipe"):
        assert saver._all.db.read(f"SELECT * FROM {table}") == [], table


def test_what_a_prune_leaves_goes_on_and_nothing_is_left_over(saver: SnapshotdSaver) -> None:
    said = messages(60)
    converse(saver, said[:100])
    saver.prune(["talk", "none"])
    (latest,) = saver.list(config("talk"))
    assert latest.checkpoint["channel_values"]["messages"] == said[:100]
    assert latest.parent_config is None
    assert saver._all.db.read("SELECT count(*) FROM piece")[0][0] <= 101
    state = checkpoint({"messages": said[:101], "topic": "unchanged"}, {"messages": 500, "topic": 1})
    at = saver.put(latest.config, state, {"source": "loop"}, {"messages": 500})
    found = saver.get_tuple(at)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"messages": said[:101], "topic": "unchanged"}
    with pytest.raises(UsageError, match="keep_latest"):
        saver.prune(["talk"], strategy="some")


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_a_long_conversation_takes_a_tenth_of_the_bytes_at_most(tmp_path: Path) -> None:
    said = messages(long.size(60, 1000))
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    with SnapshotdSaver(tmp_path / "ours" / "a.db") as saver:
        ours = converse(saver, said)
    with sqlite_saver(tmp_path / "theirs" / "a.db") as other:
        converse(other, said)
    assert size_of(tmp_path / "ours") * 10 <= size_of(tmp_path / "theirs")
    with SnapshotdSaver(tmp_path / "ours" / "a.db") as saver:
        for number in (0, 1, 64, 65, len(said) // 2, len(said) - 1):
            found = saver.get_tuple(ours[number])
            assert found is not None
            assert found.checkpoint["channel_values"]["messages"] == said[: number + 1]


def test_each_message_is_stored_once(saver: SnapshotdSaver) -> None:
    """Whether it comes as a write, in the list that grew, or in one whose beginning was cut off."""
    said = messages(50)
    at = converse(saver, said)[-1]
    count = saver._all.db.read("SELECT count(*), sum(length(data)) FROM piece")
    assert count[0][0] == len(said)
    window = checkpoint({"messages": said[20:]}, {"messages": 999})
    saver.put(at, window, {"source": "loop"}, {"messages": 999})
    assert saver._all.db.read("SELECT count(*), sum(length(data)) FROM piece") == count


def test_a_large_value_that_changes_a_little_is_stored_a_little(saver: SnapshotdSaver) -> None:
    document = random.Random(1).randbytes(long.size(4 << 20, 200 << 20))
    first = saver.put(config("t"), checkpoint({"document": document}), {"source": "loop"}, {"document": 1})
    changed = document[:1000] + b"inserted" + document[1000:]
    second = saver.put(first, checkpoint({"document": changed}, {"document": 2}), {"source": "loop"}, {"document": 2})
    stored = saver._all.db.read("SELECT sum(length(data)) FROM piece")[0][0]
    assert stored < len(document) + (256 << 10)
    for at, expected in ((first, document), (second, changed)):
        found = saver.get_tuple(at)
        assert found is not None
        assert found.checkpoint["channel_values"]["document"] == expected


def test_an_encrypted_file_shows_no_text(path: Path, tmp_path: Path) -> None:
    serde = EncryptedSerializer(Cipher())
    with SnapshotdSaver(path, serde=serde) as saver:
        at = saver.put(
            config("t"), checkpoint({"messages": [HumanMessage("SECRET " * 99, id="1")]}), {}, {"messages": 1}
        )
        saver.put_writes(at, [("messages", "SECRET")], "task")
    assert all(b"SECRET" not in file.read_bytes() for file in tmp_path.iterdir())
    with SnapshotdSaver(path, serde=serde) as saver:
        found = saver.get_tuple(at)
        assert found is not None
        assert found.checkpoint["channel_values"]["messages"][0].content == "SECRET " * 99
        assert found.pending_writes == [("task", "messages", "SECRET")]
    with SnapshotdSaver(path) as blind, pytest.raises(NotImplementedError, match="msgpack"):
        blind.get_tuple(at)


# -- several at once, and cut off --------------------------------------------------------------------------------------

WRITERS = """
import os, sys
from snapshotd.integrations.langgraph import SnapshotdSaver
from tests.langgraph_rig import checkpoint, config, messages
path, count, *threads = sys.argv[1:]
said = messages(200)

def write(thread):
    at = config(thread)
    with SnapshotdSaver(path) as saver:
        for number in range(int(count)):
            state = checkpoint({"messages": said[: number + 1]}, {"messages": number + 1})
            at = saver.put(at, state, {"source": "loop", "step": number}, {"messages": number + 1})
            saver.put_writes(at, [("messages", said[number : number + 1])], "task")
            line = thread + " " + at["configurable"]["checkpoint_id"] + "\\n"
            os.write(1, line.encode())  # at once, or lines of several processes would mix

for thread in threads[1:]:
    if os.fork() == 0:
        write(thread)
        sys.exit()
write(threads[0])
for _ in threads[1:]:
    assert os.wait()[1] == 0
"""
"""Each thread of the conversation is written by a process of its own; only the first one imports all of LangGraph."""


def start(path: Path, count: int, *threads: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITERS, str(path), str(count), *threads]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_several_processes_make_and_write_one_file(path: Path) -> None:
    """They all begin at once: one of them makes the file. Two of them write to the same thread."""
    running = start(path, 30, "one", "shared", "shared")
    told = [line.split() for line in running.communicate(timeout=120)[0].splitlines()]
    assert running.returncode == 0
    assert len(told) == 90
    with SnapshotdSaver(path) as saver:
        for thread in ("one", "shared"):
            ids = [one for written, one in told if written == thread]
            found = list(saver.list(config(thread)))
            assert sorted(one.checkpoint["id"] for one in found) == sorted(ids)
            assert all(len(one.checkpoint["channel_values"]["messages"]) == one.metadata["step"] + 1 for one in found)


def test_nothing_that_was_stored_is_lost_by_kill_9(path: Path) -> None:
    for number in range(long.size(1, 10)):
        process = start(path, 200, f"thread-{number}")
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(10 + 7 * number)]
        process.kill()
        lines += process.stdout.readlines()  # what `readline` has buffered, too
        process.stdout.close()
        seen = [line.split()[1] for line in lines]
        process.wait(60)
        with SnapshotdSaver(path) as saver:
            found = [one.checkpoint["id"] for one in saver.list(config(f"thread-{number}"))]
            assert len(found) - len(seen) in (0, 1)
            assert sorted(found)[: len(seen)] == sorted(seen)
            assert saver._all.db.problems() == []


def test_a_removal_by_another_process_is_noticed(path: Path, saver: SnapshotdSaver) -> None:
    """What a saver remembers of a thread is of no use once another one has removed it."""
    said = messages(60)
    at = converse(saver, said[:80])[-1]
    with SnapshotdSaver(path) as other:
        other.delete_thread("talk")
        converse(other, said[:3], "another")
    versions = {"messages": 81, "topic": 1}
    saver.put(at, checkpoint({"messages": said[:81], "topic": "t"}, versions), {}, {"messages": 81})
    with SnapshotdSaver(path) as other:
        found = other.get_tuple(config("talk"))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"messages": said[:81], "topic": "t"}


def test_a_checkpoint_with_its_writes_is_read_in_one_statement(path: Path, saver: SnapshotdSaver) -> None:
    """As long as its messages are in memory; and in one moment when they have to be read."""
    at = converse(saver, messages(20))[-1]
    saver.put_writes(at, [("topic", "u")], "task")

    def statements(reader: SnapshotdSaver) -> list[str]:
        seen: list[str] = []
        connection = reader._all.db.connection
        connection.exec_trace = lambda _cursor, sql, _values: seen.append(" ".join(sql.split())[:6]) or True
        found = reader.get_tuple(config("talk"))
        connection.exec_trace = None
        assert found is not None
        assert found.checkpoint["channel_values"]["messages"] == messages(20)
        assert found.pending_writes == [("task", "topic", "u")]
        return seen

    assert statements(saver) == ["WITH f"]
    with SnapshotdSaver(path) as other:
        assert statements(other) == ["WITH f", "BEGIN", "WITH f", "SELECT", "COMMIT"]
        assert statements(other) == ["WITH f"]


def test_threads_share_one_saver(saver: SnapshotdSaver) -> None:
    said = messages(10)
    running = [threading.Thread(target=converse, args=(saver, said, f"thread-{number}")) for number in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for number in range(8):
        assert len(list(saver.list(config(f"thread-{number}")))) == len(said)


# -- bad input ---------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    steps: list[str]


def test_a_class_that_is_gone_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"plan": Plan(["a"]), "plans": ["text", Plan(["b"])]}
    for serde in (None, EncryptedSerializer(Cipher())):
        with SnapshotdSaver(path, serde=serde) as saver:
            for channel, value in values.items():
                saver.put(config(channel), checkpoint({channel: value}), {}, {channel: 1})
                found = saver.get_tuple(config(channel))
                assert found is not None
                assert found.checkpoint["channel_values"][channel] == value
        with monkeypatch.context() as gone, SnapshotdSaver(path, serde=serde) as saver:
            gone.delattr(sys.modules[__name__], "Plan")
            for channel in values:
                with pytest.raises(UsageError, match=rf"class {__name__}\.Plan cannot be read back"):
                    saver.get_tuple(config(channel))


def test_pickle_is_not_used_unless_asked_for(path: Path) -> None:
    value = checkpoint({"function": len})
    with SnapshotdSaver(path) as saver, pytest.raises(TypeError, match="serializable"):
        saver.put(config("t"), value, {}, {"function": 1})
    with SnapshotdSaver(path, serde=JsonPlusSerializer(pickle_fallback=True)) as saver:
        saver.put(config("t"), value, {}, {"function": 1})
        found = saver.get_tuple(config("t"))
    assert found is not None
    assert found.checkpoint["channel_values"]["function"] is len


def test_names_may_hold_anything_but_half_a_character(saver: SnapshotdSaver) -> None:
    for name in ("a\0b", "a", "é😀", "'; DROP TABLE piece; --", "x" * 5000):
        at = saver.put(config(name, ns=name), checkpoint({name: name}), {"source": "loop"}, {name: 1})
        saver.put_writes(at, [(name, name)], name, name)
        found = saver.get_tuple(config(name, ns=name))
        assert found is not None
        assert (found.config, found.checkpoint["channel_values"]) == (at, {name: name})
        assert found.pending_writes == [(name, name, name)]
        assert len(list(saver.list(config(name, ns=name)))) == 1
    half = "\udc80"
    at = config("t", "1")
    for call in (
        lambda: saver.get_tuple(config(half)),
        lambda: saver.put(config("t", ns=half), checkpoint({}), {}, {}),
        lambda: saver.put(config("t"), checkpoint({half: 1}), {}, {}),
        lambda: saver.put_writes(at, [(half, 1)], "task"),
        lambda: saver.put_writes(at, [("c", 1)], half),
        lambda: list(saver.list(config(half))),
        lambda: saver.delete_thread(half),
    ):
        with pytest.raises(UsageError, match="lone surrogate"):
            call()
    with pytest.raises(UsageError, match="thread_id"):
        saver.get_tuple({"configurable": {}})
    with pytest.raises(UsageError, match="checkpoint_id"):
        saver.put_writes(config("t"), [("c", 1)], "task")
    with pytest.raises(UsageError, match="metadata"):
        saver.put(config("t"), checkpoint({}), {"source": object()}, {})  # type: ignore[typeddict-item]


def test_what_does_not_exist_is_not_found_and_can_be_removed(saver: SnapshotdSaver) -> None:
    assert saver.get_tuple(config("none")) is None
    assert saver.get_tuple(config("none", "1")) is None
    assert list(saver.list(config("none"))) == []
    assert saver.get_delta_channel_history(config=config("none"), channels=["a"]) == {"a": {"writes": []}}
    saver.delete_thread("none")
    saver.delete_for_runs(["none"])
    saver.prune(["none"])


def test_a_file_of_a_newer_release_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    newer, foreign, empty, cut = (tmp_path / name for name in ("newer.db", "foreign.db", "empty.db", "cut.db"))
    SnapshotdSaver(newer).close()
    with closing(Database(newer, FORM)) as database:
        database.write("PRAGMA user_version = 99")
    with pytest.raises(VersionMismatch, match=r"newer\.db was written by a newer snapshotd \(format 99"):
        SnapshotdSaver(newer)
    with sqlite_saver(foreign) as other:
        other.setup()
    with pytest.raises(DataLoss, match="another program's"):
        SnapshotdSaver(foreign)
    empty.touch()
    with pytest.raises(DataLoss, match="empty"):
        SnapshotdSaver(empty)
    with SnapshotdSaver(cut) as saver:
        converse(saver, messages(50))
    data = bytearray(cut.read_bytes())
    for place in range(9000, len(data), 5000):
        data[place] ^= 1
    cut.write_bytes(data)
    with pytest.raises(DataLoss, match="damaged"), SnapshotdSaver(cut) as saver:
        list(saver.list(None))
    with pytest.raises(NotFound, match="folder"):
        SnapshotdSaver(tmp_path / "none" / "a.db")


def test_a_file_that_is_missing_beside_its_log_is_not_made_anew(path: Path) -> None:
    log = path.with_name(f"{path.name}-wal")
    with SnapshotdSaver(path) as saver:
        saver.put(config("t"), checkpoint({"a": 1}), {}, {"a": 1})
        kept = log.read_bytes()
    path.unlink()
    log.write_bytes(kept)
    with pytest.raises(DataLoss, match="is missing although its log"):
        SnapshotdSaver(path)
    assert log.read_bytes() == kept
    log.unlink()
    SnapshotdSaver(path).close()


def test_a_checkpoint_may_be_its_own_ancestor(saver: SnapshotdSaver) -> None:
    """As when one is stored again under a config that follows it."""
    state = checkpoint({})
    at = saver.put(config("t"), state, {"run_id": "1", "counters_since_delta_snapshot": {"a": (1, 1)}}, {})
    saver.put(at, state, {"run_id": "1", "counters_since_delta_snapshot": {"a": (1, 1)}}, {})
    saver.put_writes(at, [("a", 1)], "task")
    assert saver.get_delta_channel_history(config=at, channels=["a"]) == {"a": {"writes": []}}
    saver.prune(["t"])
    assert len(list(saver.list(config("t")))) == 1
    saver.delete_for_runs(["1"])
    assert list(saver.list(None)) == []
