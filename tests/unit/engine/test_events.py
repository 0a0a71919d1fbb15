"""Any number of readers follow a run from its beginning, also after a crash cut the last line in half."""

from __future__ import annotations

import base64
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.base import Event, Stream, output_event
from snapshotd.engine.events import EventLogs, with_whole_output
from snapshotd.types import TrajectoryID
from tests.loop_disk import memory_disk

RUN = TrajectoryID("0" * 32)
MAX_BYTES = 32 << 20


def test_late_and_early_readers_see_the_same(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs", MAX_BYTES)
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
    assert [e["event"] for e in EventLogs(tmp_path / "runs", MAX_BYTES).follow(RUN, wait=True)] == early, (
        "another daemon reads the file"
    )


def test_without_waiting_a_reader_gets_what_is_there(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs", MAX_BYTES)
    logs.begin(RUN).append({"event": "started"})
    assert [e["event"] for e in logs.follow(RUN, wait=False)] == ["started"]


def test_half_a_line_after_a_crash_is_left_out(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs", MAX_BYTES)
    logs.begin(RUN).append({"event": "started"})
    with open(tmp_path / "runs" / f"{RUN}.ndjson", "ab") as f:
        f.write(b'{"event": "outp')
    assert [e["event"] for e in EventLogs(tmp_path / "runs", MAX_BYTES).follow(RUN, wait=True)] == ["started"]


def test_a_full_disk_leaves_no_half_line_in_front_of_what_comes_later(tmp_path: Path) -> None:
    with memory_disk(tmp_path, "256k") as disk:
        logs = EventLogs(disk / "runs", MAX_BYTES)
        log = logs.begin(RUN)
        log.append({"event": "started"})
        seen: list[str] = []
        ended = threading.Event()
        follow = logs.follow(RUN, wait=lambda: not ended.is_set())
        reader = threading.Thread(target=lambda: seen.extend(e["event"] for e in follow))
        reader.start()
        line = {"event": "output", "stream": "stdout", "data_b64": "x" * 10_000}

        def fill() -> None:
            while True:
                log.append(line)

        try:
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                fill()
            log.append({"event": "finished"})
        finally:
            ended.set()
            reader.join(30)
        assert seen[0] == "started"
        assert set(seen[1:-1]) == {"output"}
        assert seen[-1] == "finished"
        again = EventLogs(disk / "runs", MAX_BYTES)
        assert [e["event"] for e in again.follow(RUN, wait=True)] == seen, "another daemon reads the file"


def test_endless_output_does_not_fill_the_disk(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs", MAX_BYTES)
    log = logs.begin(RUN)
    line = {"event": "output", "stream": "stdout", "data_b64": "x" * (1 << 20)}
    for _ in range(MAX_BYTES // (1 << 20) + 20):
        log.append(line)
    log.append({"event": "snapshot"})
    log.append({"event": "finished"})
    assert (tmp_path / "runs" / f"{RUN}.ndjson").stat().st_size <= MAX_BYTES + (1 << 20) + 1000
    assert [e["event"] for e in logs.follow(RUN, wait=True)][-3:] == ["warning", "snapshot", "finished"]


def _printed(found: list[Event], stream: str) -> bytes:
    return b"".join(
        base64.b64decode(e["data_b64"])
        for e in found
        if e["event"] == "output" and e["stream"] == stream and "call" not in e
    )


def test_what_a_full_log_left_out_comes_from_the_record(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs", 20_000)
    log = logs.begin(RUN)
    lines = {"stdout": b"".join(b"%d\n" % n for n in range(40_000)), "stderr": b"short"}
    log.append(output_event("stderr", lines["stderr"]))
    for at in range(0, 120_000, 1000):
        log.append(output_event("stdout", lines["stdout"][at : at + 1000]))
        if at == 60_000:
            logs = EventLogs(tmp_path / "runs", 20_000)
            log = logs.begin(RUN)  # another daemon: what is left out stays one piece
            log.append(output_event("stdout", b"tiny"))
            log.append({**output_event("stdout", b"of a call"), "call": "c" * 32})
    log.append({"event": "rest", "snapshot": "s" * 32})
    assert +log.left_out == {"calls": 9}
    log.append({"event": "finished"})
    asked: list[tuple[str, Stream]] = []

    def recorded(piece_bytes: int) -> list[Event]:
        def of(snapshot: str, stream: Stream) -> Iterator[bytes]:
            asked.append((snapshot, stream))
            yield from (lines[stream][at : at + piece_bytes] for at in range(0, len(lines[stream]), piece_bytes))

        return list(with_whole_output(logs.follow(RUN, wait=True), of))

    found = recorded(777)
    assert [_printed(found, stream) for stream in ("stdout", "stderr")] == [lines["stdout"], lines["stderr"]]
    assert found[-1] == {"event": "finished"}
    assert asked == [("s" * 32, "stdout"), ("s" * 32, "stderr")]
    assert recorded(100_000) == found, (
        "a follower that asks again sees the same events, however the output is stored by then"
    )


def test_a_removed_run_has_no_events(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path / "runs", MAX_BYTES)
    logs.begin(RUN).append({"event": "finished"})
    logs.remove(RUN)
    assert list(logs.follow(RUN, wait=True)) == []
