"""Any number of readers follow a run from its beginning, also after a crash cut the last line in half."""

from __future__ import annotations

import threading
from pathlib import Path

from snapshotd.engine import events
from snapshotd.engine.events import EventLogs
from snapshotd.types import TrajectoryID

RUN = TrajectoryID("0" * 32)


def test_late_and_early_readers_see_the_same(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs")
    log = logs.begin(RUN)
    log.append({"event": "started"})
    early: list[str] = []
    reader = threading.Thread(target=lambda: early.extend(e["event"] for e in logs.follow(RUN, wait=True)))
    reader.start()
    log.append({"event": "output", "stream": "stdout", "data_b64": ""})
    log.append({"event": "finished"})
    reader.join(30)
    assert early == ["started", "output", "finished"]
    assert [e["event"] for e in logs.follow(RUN, wait=True)] == early
    assert [e["event"] for e in EventLogs(tmp_path / "runs").follow(RUN, wait=True)] == early, "another daemon reads the file"


def test_without_waiting_a_reader_gets_what_is_there(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs")
    logs.begin(RUN).append({"event": "started"})
    assert [e["event"] for e in logs.follow(RUN, wait=False)] == ["started"]


def test_half_a_line_after_a_crash_is_left_out(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs")
    logs.begin(RUN).append({"event": "started"})
    with open(tmp_path / "runs" / f"{RUN}.ndjson", "ab") as f:
        f.write(b'{"event": "outp')
    assert [e["event"] for e in EventLogs(tmp_path / "runs").follow(RUN, wait=True)] == ["started"]


def test_endless_output_does_not_fill_the_disk(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs")
    log = logs.begin(RUN)
    line = {"event": "output", "stream": "stdout", "data_b64": "x" * (1 << 20)}
    for _ in range(events.MAX_BYTES // (1 << 20) + 20):
        log.append(line)
    log.append({"event": "snapshot"})
    log.append({"event": "finished"})
    assert (tmp_path / "runs" / f"{RUN}.ndjson").stat().st_size <= events.MAX_BYTES + 1000
    assert [e["event"] for e in logs.follow(RUN, wait=True)][-3:] == ["warning", "snapshot", "finished"]


def test_a_removed_run_has_no_events(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs")
    logs.begin(RUN).append({"event": "finished"})
    logs.remove(RUN)
    assert list(logs.follow(RUN, wait=True)) == []
