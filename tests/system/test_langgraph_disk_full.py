"""A disk that fills up under a LangGraph saver: an error that says so, and nothing that was stored is lost."""

from __future__ import annotations

import os

import pytest

from snapshotd.errors import OutOfSpace
from snapshotd.integrations.langgraph import SnapshotdSaver
from tests.capabilities import require
from tests.langgraph_rig import checkpoint, config
from tests.loop_disk import loop_disk


def test_a_full_disk_is_said_and_freed_space_is_enough_to_go_on() -> None:
    require("root")
    with loop_disk("ext4", 16 << 20) as disk:
        ballast = disk.mount_point / "ballast"
        ballast.write_bytes(os.urandom(8 << 20))
        with SnapshotdSaver(disk.mount_point / "agent.db") as saver:
            at, stored = config("t"), 0

            def fill() -> None:
                nonlocal at, stored
                while True:
                    state = checkpoint({"blob": os.urandom(200_000)}, {"blob": stored + 1})
                    at = saver.put(at, state, {"source": "loop", "step": stored}, {"blob": stored + 1})
                    stored += 1

            with pytest.raises(OutOfSpace, match="disk is full"):
                fill()
            assert stored > 3
            assert [one.metadata["step"] for one in saver.list(config("t"))] == list(reversed(range(stored)))
        with SnapshotdSaver(disk.mount_point / "agent.db") as saver:
            assert saver._all.db.problems() == []
            ballast.unlink()
            saver.prune(["t"])
            latest = saver.get_tuple(config("t"))
            assert latest is not None
            assert latest.metadata["step"] == stored - 1
            saver.put(latest.config, checkpoint({"small": "x"}), {"source": "loop", "step": stored}, {"small": 1})
            assert len(list(saver.list(config("t")))) == 2
