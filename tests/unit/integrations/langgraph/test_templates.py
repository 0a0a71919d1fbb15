"""Messages that were read before are copied: each caller has objects of its own, which are what the serialiser makes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.sqlite import SqliteSaver

from snapshotd.integrations.langgraph import SnapshotdSaver
from snapshotd.integrations.langgraph.templates import Templates
from tests.langgraph_rig import checkpoint, config, messages


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SnapshotdSaver]:
    with SnapshotdSaver(tmp_path / "a.db") as saver:
        yield saver


def stored(saver: Any, values: list[Any]) -> None:
    saver.put(config("t"), checkpoint({"messages": values}), {"source": "loop", "step": 1}, {"messages": 1})


def read(saver: Any) -> list[Any]:
    found: list[Any] = saver.get_tuple(config("t")).checkpoint["channel_values"]["messages"]
    return found


def many_kinds() -> list[AnyMessage]:
    """With everything that a message may hold in place, and more of them than are learned at first sight."""
    call = {"name": "f", "args": {"deep": [{"a": [1, None]}, 2.5]}, "id": "c", "type": "tool_call"}
    usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3, "input_token_details": {"cache_read": 1}}
    return [
        *messages(40),
        HumanMessage([{"type": "text", "text": "x" * 300}, {"type": "image_url", "image_url": {"url": "data:" + "y" * 300}}]),
        AIMessage("z" * 300, tool_calls=[call], usage_metadata=usage, additional_kwargs={"k": {"l": [1]}}, name="n"),
        ToolMessage("w" * 300, tool_call_id="c", artifact={"rows": [[1, 2], [3]]}, status="error"),
    ]  # fmt: skip


def test_copies_are_what_the_serialiser_makes(saver: SnapshotdSaver) -> None:
    said = many_kinds()
    stored(saver, said)
    first, second, third = (read(saver) for _ in range(3))
    assert saver._templates._made, "nothing was learned"
    assert first == second == third == said
    for one, other in zip(first, third, strict=True):
        assert type(one) is type(other)
        assert one.model_fields_set == other.model_fields_set
        assert one.model_dump() == other.model_dump()
        assert saver.serde.dumps_typed(one) == saver.serde.dumps_typed(other)


def test_no_caller_sees_what_another_one_changes(saver: SnapshotdSaver) -> None:
    stored(saver, many_kinds())
    for _ in range(3):
        for message in read(saver):
            message.additional_kwargs["mine"] = 1
            message.response_metadata["mine"] = 1
            message.extra_field = 1
            if isinstance(message.content, list):
                message.content[0]["text"] = "mine"
            if isinstance(message, AIMessage):
                for call in message.tool_calls:
                    call["args"]["deep"][0]["a"].append("mine")
            if isinstance(message, ToolMessage):
                message.artifact["rows"][0].append("mine")
            message.content = "mine"
    assert read(saver) == many_kinds()


def test_other_values_are_made_as_ever(saver: SnapshotdSaver) -> None:
    """A list of other things, messages with other things in them, and one that is longer than a piece."""
    said: list[Any] = [
        ToolMessage("a" * 300, tool_call_id="c", artifact=datetime(2026, 11, 25)),
        {"plain": "b" * 300},
        "c" * 300,
        HumanMessage("d" * 200_000),
        *messages(3),
    ]
    for values in (said, said[:1], said[1:3], said[3:4], said[4:]):
        stored(saver, values)
        for _ in range(3):
            assert read(saver) == values


def test_a_piece_that_is_a_part_of_a_message_is_no_message(saver: SnapshotdSaver) -> None:
    """Cut within a long message, with text that reads as msgpack itself."""
    inner = saver.serde.dumps_typed([HumanMessage("never said")])[1][1:]
    stored(saver, [HumanMessage([inner.decode("latin-1") * 2000]), *messages(20)])
    (one, *_), (other, *_) = read(saver), read(saver)
    assert one == other == HumanMessage([inner.decode("latin-1") * 2000])


def test_what_is_kept_is_bounded(saver: SnapshotdSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.integrations.langgraph.templates._KEPT_BYTES", 40_000)
    for part in range(6):
        stored(saver, messages(20, seed=part))
        assert read(saver) == read(saver) == read(saver) == messages(20, seed=part)
    kept: Templates = saver._templates
    assert 0 < kept._size <= 40_000
    assert kept._size == sum(kept._sizes.values())
    assert kept._sizes.keys() == kept._made.keys()


def test_the_same_history_as_another_saver(saver: SnapshotdSaver) -> None:
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as connection:
        savers: tuple[Any, Any] = saver, SqliteSaver(connection)
        said = messages(60)
        states = [checkpoint({"messages": said[: number + 1]}) for number in range(60)]
        for one in savers:
            at: Any = config("t")
            for step, state in enumerate(states):
                at = one.put(at, state, {"source": "loop", "step": step}, {"messages": 1})
        for _ in range(2):
            ours, theirs = ([found.checkpoint for found in one.list(config("t"))] for one in savers)
            assert ours == theirs
