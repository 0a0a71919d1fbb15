"""Files of a LangGraph saver as older releases wrote them. They never change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from snapshotd.integrations.langgraph import SnapshotdSaver, SnapshotdStore
from tests.golden.make_langgraph import LARGE, said
from tests.langgraph_rig import config, converse


@pytest.mark.parametrize("version", [1])
def test_an_old_file_is_read_and_goes_on(tmp_path: Path, version: int) -> None:
    path = Path(shutil.copyfile(Path(__file__).with_name(f"langgraph-v{version}.db"), tmp_path / "agent.db"))
    expected = said()
    with SnapshotdSaver(path) as saver:
        for thread in ("talk", "copy"):
            found = list(saver.list(config(thread)))
            assert [one.metadata["step"] for one in found] == list(reversed(range(len(expected))))
            for one in found:
                values = {"messages": expected[: one.metadata["step"] + 1], "topic": "unchanged"}
                assert one.checkpoint["channel_values"] == values
        assert found[0].pending_writes == [("task", "text", "pending")]
        large = saver.get_tuple(config("large", "2"))
        assert large is not None
        assert large.checkpoint["channel_values"] == {"large": LARGE}
        converse(saver, expected, "new")
        saver.prune(["talk"])
        saver.delete_thread("copy")
        left = saver.get_tuple(config("talk"))
        assert left is not None
        assert left.checkpoint["channel_values"]["messages"] == expected
    with SnapshotdStore(path) as store:
        assert [item.key for item in store.search(("users",), query="creme")] == ["food"]
