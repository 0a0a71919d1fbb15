"""Text and figures of sandboxes in containers, through the command line."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from snapshotd.client import Snapshotd
from tests.e2e.support import Snap, wait_until

pytestmark = pytest.mark.runc
SECRET = "correct-horse-battery"


def test_what_was_printed_is_found_with_its_history_and_goes_with_it(snap: Snap) -> None:
    box, _ = snap.create("--name", "found", "--runtime", "runc", "--secret", f"TOKEN={SECRET}")
    snap.sh(box, f"echo the quick brown fox; echo {SECRET}")
    child = snap.json("fork", "found")["trajectories"][0]
    snap.sh(child, "echo the lazy dog")
    (hit,) = [hit for hit in snap.json("find", '"quick brown"')["hits"] if hit["kind"] == "output"]
    assert (hit["trajectory"], hit["name"], hit["seq"], hit["part"]) == (box, "found", 1, "stdout")
    outputs = [hit for hit in snap.json("find", "the", child)["hits"] if hit["kind"] == "output"]
    assert [(hit["trajectory"], hit["seq"]) for hit in outputs] == [(child, outputs[0]["seq"]), (box, 1)]
    assert snap.json("find", f'"{SECRET.replace("-", " ")}"')["hits"] == [], "a secret is a marker in the records"
    assert SECRET not in snap("find", "quick").stdout
    snap("rm", "--force", child, box)
    assert snap.json("find", "quick")["hits"] == []


def test_a_containers_load_is_told_and_prometheus_reads_it(snap: Snap) -> None:
    box, _ = snap.create("--name", "busy", "--runtime", "runc")
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    client.exec_in_background("busy", ["sh", "-c", "while :; do :; done"])

    def cpu_ms() -> float:
        return next(one.cpu_ms for one in client.stats().sandboxes if one.trajectory == box)

    wait_until(lambda: cpu_ms() > 100, "its processor time is told")
    shown = snap("stats", "--no-stream").stdout
    (line,) = [line for line in shown.splitlines() if " busy " in line and "%" in line]
    assert int(line.split()[2].rstrip("%")) > 0
    text = scrape(client.socket_path)
    series = {
        one.name: one
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.labels.get("trajectory") == box
    }
    assert series["snapshotd_sandbox_cpu_seconds_total"].value > 0.1
    assert series["snapshotd_sandbox_memory_bytes"].value > 0
    assert series["snapshotd_sandbox_processes"].value >= 2
    snap("rm", "--force", box)
    assert box not in scrape(client.socket_path)


def scrape(path: Path) -> str:
    """As `curl --unix-socket` does."""
    connection = http.client.HTTPConnection("snapshotd", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/v1/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text
