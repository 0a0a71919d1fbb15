"""What a list of all trajectories, a log and a snapshot say of size, tokens, cost and time."""

from __future__ import annotations

import json
from pathlib import Path

from snapshotd.client.client import Snapshotd
from tests.unit.daemon.asking import JSON, Connection, ask, eventually, lines
from tests.unit.daemon.process import Daemon

PROGRAM = """
from snapshotd.agent import model, record_usage, tool

@model
def think(prompt):
    record_usage(input_tokens=100, output_tokens=7, cost_usd=0.25)
    return "write"

@tool(side_effect="irreversible")
def write(text):
    open("out", "w").write(text)

for number in range(3):
    think("what now?")
    write("x" * 100)
"""


def run(daemon: Daemon, tmp_path: Path, name: str) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(PROGRAM)
    assert ask(daemon, "POST", "/runs", {"name": name, "agent": str(agent)})[0] == 201
    *_, last = lines(daemon, "GET", f"/trajectories/{name}/events")
    assert last["status"] == "finished", last


def test_model_calls_are_told_of_with_their_snapshot_and_added_up(daemon: Daemon, tmp_path: Path) -> None:
    connection = Connection(daemon)
    connection.request("GET", "/v1/watch", headers=JSON)
    heard = connection.getresponse()
    run(daemon, tmp_path, "thinker")
    log = [one for one in ask(daemon, "GET", "/trajectories/thinker/log")[1] if one["tool"]["name"] == "write"]
    assert [one["side_effect"] for one in log] == ["irreversible"] * 3
    for one in log:
        use = one["model_use"]
        assert (use.pop("duration_ms") > 0, use) == (
            True,
            {"call_count": 1, "input_tokens": 100, "output_tokens": 7, "cached_tokens": 0, "cost_usd": 0.25},
        )
        assert ask(daemon, "GET", f"/snapshots/{one['id']}")[1]["side_effect"] == "irreversible"
    (own,) = ask(daemon, "GET", "/overview?trajectory=thinker")[1]
    assert (own["model_use"]["call_count"], own["model_use"]["input_tokens"], own["model_use"]["cost_usd"]) == (
        3,
        300,
        0.75,
    )
    assert own["newest"]["id"] == own["trajectory"]["head"]
    told: dict[str, float] = {}
    while len(told) < 3:  # the background tells once more, with what the model calls took
        event = json.loads(heard.readline())
        if event["event"] == "snapshot" and event["snapshot"]["model_use"] is not None:
            told[event["snapshot"]["id"]] = event["snapshot"]["model_use"]["cost_usd"]
    assert told == {one["id"]: 0.25 for one in log}
    connection.close()


def sizes(client: Snapshotd) -> tuple[int, int]:
    """They are known when the background has counted the files, and stored the layers."""
    (own,) = client.overview("box")
    return own.file_bytes, own.layer_bytes


def test_an_overview_has_sizes_and_origins(daemon: Daemon) -> None:
    assert ask(daemon, "POST", "/sandboxes", {"name": "box"})[0] == 201
    write = {"argv": ["/bin/sh", "-c", "head -c 8192 /dev/zero > big"]}
    lines(daemon, "POST", "/trajectories/box/exec", write)
    head = ask(daemon, "GET", "/trajectories/box")[1]["head"]
    assert ask(daemon, "POST", "/snapshots/box/fork", {"name": "child"})[0] == 201
    client = Snapshotd(socket=daemon.socket_path)
    eventually(lambda: min(sizes(client)) >= 8192)
    parent, child = client.overview()
    assert (parent.trajectory.name, parent.snapshots, parent.origin, parent.layer_bytes >= 8192) == (
        "box",
        2,
        None,
        True,
    )
    assert (child.trajectory.name, child.file_bytes, child.layer_bytes, child.model_use.call_count) == (
        "child",
        0,
        0,
        0,
    )
    assert child.origin is not None
    assert child.origin.id == head
    assert ask(daemon, "GET", "/overview?trajectory=nobody")[0] == 404
    assert (
        ask(daemon, "GET", "/usage")[1]["states"]["captured"] + ask(daemon, "GET", "/usage")[1]["states"]["stored"] >= 2
    )
