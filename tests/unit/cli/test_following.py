"""What `attach`, `run` and `resume` say of a daemon that goes away in the middle of a run, and of one that takes its
place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.cli.main import main
from tests.unit.client.events_server import TRAJECTORY, Answer, EventsServer, serving

NOTE = "snapshotd: the daemon went away; following its successor"
SNAPSHOT = {
    "event": "snapshot",
    "id": "c" * 32,
    "seq": 1,
    "name": "shell",
    "status": "done",
    "files": {"added": 1, "changed": 0, "deleted": 0, "bytes": 4},
    "pause_ms": 2.0,
}
EVENTS: list[dict[str, Any]] = [
    {"event": "started", "trajectory": TRAJECTORY, "snapshot": "b" * 32, "runtime": "runc", "image_name": "default"},
    {"event": "output", "stream": "stdout", "data_b64": "b25lCg=="},
    SNAPSHOT,
    {"event": "output", "stream": "stdout", "data_b64": "dHdvCg=="},
    {"event": "finished", "trajectory": TRAJECTORY, "exit_code": 3, "snapshot_count": 2, "status": "failed"},
]
INTERRUPTED = {
    "event": "finished",
    "trajectory": TRAJECTORY,
    "exit_code": None,
    "snapshot_count": 2,
    "status": "interrupted",
}


@pytest.fixture
def server(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventsServer]:
    monkeypatch.delenv("SNAPSHOTD_STATE_DIR")
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(short_dir / "s.sock"))  # only that: it is never started by a command
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "60")
    with serving(EventsServer(short_dir / "s.sock", list(EVENTS), answers=[Answer(3)])) as running:
        yield running


def test_a_followed_run_goes_on(server: EventsServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", "box"]) == 3
    said = capfd.readouterr()
    assert said.out == "one\ntwo\n"
    lines = said.err.splitlines()
    assert [line[:1] for line in lines] == ["▶", "●", "s", "■"]
    assert lines[2] == NOTE
    assert server.asked == 2


def test_quietly(server: EventsServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", "--quiet", "box"]) == 3
    assert capfd.readouterr() == ("one\ntwo\n", "")


def test_as_json(server: EventsServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", "--json", "box"]) == 3
    said = capfd.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == EVENTS
    assert said.err == f"{NOTE}\n"


def test_a_run_that_did_not_outlive_its_daemon(server: EventsServer, capfd: pytest.CaptureFixture[str]) -> None:
    server.events = [*EVENTS[:3], INTERRUPTED]
    assert main(["attach", "box"]) == 125
    said = capfd.readouterr()
    assert said.out == "one\n"
    assert said.err.splitlines()[2] == NOTE
    assert said.err.splitlines()[3].startswith("■ interrupted, 2 snapshots")
    assert "went away before its agent ended (interrupted)" in said.err.splitlines()[4]
    assert f"snapshotd resume {TRAJECTORY[:12]}" in said.err.splitlines()[4]


def test_nobody_comes(server: EventsServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "0.05")
    server.answers = [Answer(3) for _ in range(50)]
    assert main(["attach", "box"]) == 125
    *_, told, last = capfd.readouterr().err.splitlines()
    assert told == NOTE
    assert last.startswith("snapshotd: the daemon went away in the middle")
