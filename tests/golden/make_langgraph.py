"""Makes a golden file of a LangGraph saver and store of the present format: `python -m tests.golden.make_langgraph FOLDER`,
once for every new format. `said` says what is in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from snapshotd.integrations.langgraph import SnapshotdSaver, SnapshotdStore
from tests.langgraph_rig import config, converse, messages

LARGE = b"".join(b"line %d of a document\n" % number for number in range(9000))


def said() -> list[Any]:
    return messages(40, seed=7)


def make(path: Path) -> None:
    with SnapshotdSaver(path) as saver:
        last = converse(saver, said())[-1]
        saver.put_writes(last, [("text", "pending")], "task", "~1")
        saver.copy_thread("talk", "copy")
        found = saver.get_tuple(config("copy"))
        assert found is not None
        large: Any = {
            **found.checkpoint,
            "id": "2",
            "channel_values": {"large": LARGE},
            "channel_versions": {"large": 1},
        }
        saver.put(config("large"), large, {"source": "input", "step": -1}, {"large": 1})
    with SnapshotdStore(path, index={"dims": 2, "embed": lambda texts: [[len(text), 1.0] for text in texts]}) as store:
        store.put(("users", "ann"), "food", {"text": "Ann likes crème brûlée"})


if __name__ == "__main__":
    make(Path(sys.argv[1]) / "langgraph-v1.db")
