"""The command that an experiment recommends is one that works."""

from __future__ import annotations

import re

import pytest

from snapshotd.client.branching.experiment_file import parse_experiment
from snapshotd.client.branching.experiment_records import ExperimentBranch, Records
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.process import Daemon

_TEXT = 'from = "{}"\nn = 2\nprogram = ["true"]\n[score]\ncommand = ["true"]\n'


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("went_on", [True, False])
def test_the_recommended_promote_is_taken(
    cli: Cli, daemon: Daemon, passed: bool, went_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(daemon.state_dir))
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(daemon.socket_path))
    client = daemon.client
    line, first = client.create(name="box")
    records = Records(client, "ways")
    text = _TEXT.format(first.id)
    records.begin(parse_experiment(text, "ways.toml", "/", "ways"), first.id, "2026-01-01T00:00:00.000000Z")
    for run in (0, 1):
        fork = client.fork(first.id).trajectories[0]
        client.exec(fork.id, ["ls"])
        records.save(
            ExperimentBranch(str(run), 0, "scored", fork.id, score=float(run), passed=passed and run == 1, exit_code=0)
        )
    if went_on:
        client.exec(line.id, ["ls"])
    said = cli("experiment", "status", "ways").out.splitlines()[-1]
    assert cli("experiment", "status", "--branches", "ways").out.splitlines()[-1] == said
    assert said.startswith("best: 1.0")
    assert ("did not pass" in said, "box went on" in said) == (not passed, went_on)
    (command,) = re.findall(r"`snapshotd ([^`]+)`", said)
    done = cli(*command.split())
    assert done.code == 0, (command, done.err)
    assert client.snapshot("box").tool.name == "promote"
