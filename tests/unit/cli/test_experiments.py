"""The command that an experiment recommends is one that works."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from snapshotd.client.remote.logins import Login, save_login
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.process import Daemon, start

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


def test_a_fleet_runs_the_same_file(
    cli: Cli, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_dir: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "ways.toml").write_text(_TEXT.format("box", '["true"]'))
    daemon.client.create(name="box")
    with closing(start(short_dir / "o", short_dir / "o.sock", SMALL_LISTEN="127.0.0.1:0")) as other:
        told = other.client.status()
        save_login(
            told["listening"], Login(other.client.create_token("t", scopes=["admin"]).token, told["fingerprint"])
        )
        fleet = ("--fleet", f"unix://{daemon.socket_path}", "--fleet", told["listening"])
        done = cli("experiment", "run", *fleet, "--json", str(tmp_path / "ways.toml"))
        assert (done.code, done.json["ended_because"]) == (0, "all branches have ended"), done.err
        assert [one["status"] for one in done.json["branches"]] == ["scored"] * 2
        assert [[one.name for one in each.client.trajectories() if one.experiment] for each in (daemon, other)] == [
            ["ways.1.0.0"],
            ["ways.0.0.0"],
        ]
        said = cli("experiment", "run", *fleet, str(tmp_path / "ways.toml"))
        assert re.search(r"^best: [01].0, trajectory \w+ on its node$", said.out, re.MULTILINE)
        assert cli("experiment", "run", "--detach", *fleet, str(tmp_path / "ways.toml")).code == 2
