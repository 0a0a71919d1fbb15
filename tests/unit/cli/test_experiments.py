"""The command that an experiment recommends is one that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.daemon.process import Daemon

_TEXT = 'from = "{}"\nn = 2\nprogram = ["true"]\n[score]\ncommand = {}\n'


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("went_on", [True, False])
def test_the_recommended_promote_is_taken(
    cli: Cli, daemon: Daemon, passed: bool, went_on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(daemon.state_dir))
    monkeypatch.setenv("SNAPSHOTD_SOCKET", str(daemon.socket_path))
    client = daemon.client
    line, first = client.create(name="box")
    (tmp_path / "ways.toml").write_text(_TEXT.format(first.id, '["true"]' if passed else '["fail", "1", "x"]'))
    client.run_experiment(tmp_path / "ways.toml")
    if went_on:
        client.exec(line.id, ["ls"])
    said = cli("experiment", "status", "ways").out.splitlines()[-1]
    assert cli("experiment", "status", "--branches", "ways").out.splitlines()[-1] == said
    assert said.startswith(("best: 0.0", "best: 1.0"))
    assert ("did not pass" in said, "box went on" in said) == (not passed, went_on)
    (command,) = re.findall(r"`snapshotd ([^`]+)`", said)
    done = cli(*command.split())
    assert done.code == 0, (command, done.err)
    assert client.snapshot("box").tool.name == "promote"
