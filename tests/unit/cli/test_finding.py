"""The lines of `find` and `stats`."""

from __future__ import annotations

import click
import pytest

from snapshotd.cli.commands.inspection import find
from snapshotd.cli.commands.storage import stats
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.sample_figures import FOUND, STATS


def test_a_hit_is_one_line_with_the_match_marked() -> None:
    (line,) = (find._line(hit, full=False) for hit in FOUND.hits)
    assert click.unstyle(line) == "box 3 777777777777 output stdout: … a word here"
    assert click.style("word", fg="red", bold=True) in line


def test_found_lines_say_where_there_are_more(cli: Cli, box: str) -> None:
    for number in range(3):
        assert cli("exec", box, "--", "/bin/sh", "-c", f"echo walrus {number}").code == 0
    first = cli("find", "--limit", "2", "walrus*", box)
    assert [line.split(":")[1].strip().split()[0] for line in first.out.splitlines()] == ["walrus", "exec"]
    (more,) = first.err.splitlines()
    assert more.startswith("there are more: add --before ")
    assert len(cli("find", "--before", more.split()[-1], "walrus*", box).out.splitlines()) == 4
    assert len(cli("find", "--json", '"walrus 1"', box).json["hits"]) == 2
    assert cli("find", "walrus", "nobody").code != 0
    assert (cli("find", "walruses", box).out, cli("find", "walruses", box).code) == ("", 0)


def test_stats_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    stats._show(STATS, STATS, full=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["TRAJECTORY", "NAME", "CPU", "MEMORY", "/", "LIMIT", "PROCESSES", "AGENT", "STARTED"]
    assert shown[1].split()[:8] == ["777777777777", "box", "0%", "3.0", "MiB", "/", "2.0", "GiB"]
    assert shown[-1] == (
        "1 snapshot to be stored; 4 pauses within the last hour, half of them up to 5.0 ms, the longest 9.5 ms"
    )


def test_stats_are_json_and_metrics_too(cli: Cli, box: str) -> None:
    found = cli("stats", "--json").json
    assert box in [one["name"] for one in found["sandboxes"]]
    assert "GET /stats" in [one["operation"] for one in cli("stats", "--json").json["requests"]]
    assert cli("stats", "--prometheus").out.startswith("# HELP snapshotd_build_info")
    assert " box" in cli("stats").out or box in cli("stats", "--no-stream").out
