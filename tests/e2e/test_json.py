"""What `--json` prints on a real daemon is in the words of the table that docs/cli.md prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.support import Snap
from tests.json_words import faults

pytestmark = pytest.mark.runc


def _said(answer: Any) -> set[str]:
    """The words of an answer, all of which are as the table says."""
    met: set[str] = set()
    assert list(faults(answer, "list of object" if isinstance(answer, list) else "object", "the answer", met)) == []
    return met


def test_a_run_a_search_and_a_port(snap: Snap) -> None:
    lines = snap("run", "--json", "--name", "spoken", "--runtime", "runc", "--reuse", "--", "true").stdout.splitlines()
    assert {"reuse", "snapshot_count", "image_name"} <= _said([json.loads(line) for line in lines])
    trajectory, first = snap.create("--runtime", "runc", "--name", "broken")
    snap.sh("broken", "touch bad")
    found = snap.json("bisect", "--good", first, "broken", "--", "sh", "-c", "! test -e bad")
    assert {"first_bad", "last_good", "tried", "round", "outcome", "flaky"} <= _said(found)
    process = snap.follow("port", "--json", "broken", "8000")
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert (_said(told), told["trajectory"]) == ({"address", "trajectory", "port"}, trajectory)
    for words in (
        ["ps"],
        ["ls"],
        ["tree"],
        ["df"],
        ["check"],
        ["doctor"],
        ["version"],
        ["compare", "broken", "spoken"],
    ):
        _said(json.loads(snap(*words, "--json", code=None).stdout))
    status = snap.json("daemon", "--status")
    assert {"durability", "layer_kind", "trajectory_count", "sandbox_count", "settings"} <= _said(status)
    snap("rm", "--force", "broken", "spoken")
