"""`find` and `stats` on the fake engine, which has something in every field."""

from __future__ import annotations

import click
import pytest

from snapshotd.cli.commands.looking import find
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.fake_figures import FOUND
from tests.unit.daemon.process import start_fake as start_daemon  # noqa: F401 - see conftest.py


def test_a_hit_is_one_line_with_the_match_marked(cli: Cli) -> None:
    found = cli("find", "word")
    assert found.out == "box 3 777777777777 output stdout: … a word here\n"
    assert found.err.splitlines() == ["there are more: add --before 7", "1 snapshot not in the index yet"]
    (line,) = (find._line(hit, full=False) for hit in FOUND.hits)
    assert click.style("word", fg="red", bold=True) in line
    assert cli("find", "--json", "word").json["hits"][0]["matches"] == [[4, 8]]


def test_stats_are_a_table_json_or_metrics(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    shown = cli("stats", "--no-stream").out.splitlines()
    assert shown[0].split() == ["TRAJECTORY", "NAME", "CPU", "MEMORY", "/", "LIMIT", "PROCESSES", "AGENT", "STARTED"]
    assert shown[1].split()[:8] == ["777777777777", "box", "0%", "3.0", "MiB", "/", "2.0", "GiB"]
    assert shown[-1] == (
        "1 snapshot to be stored; 4 pauses within the last hour, half of them up to 5.0 ms, the longest 9.5 ms"
    )
    requests = cli("stats", "--json").json["requests"]
    assert "GET /stats" in [one["operation"] for one in requests], "the daemon counts its own"
    assert cli("stats", "--prometheus").out.startswith("# HELP snapshotd_build_info")
