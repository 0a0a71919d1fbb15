"""Hooks in the settings of agents: added to what is there, and taken out without a trace."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from snapshotd.client.local.hook_settings import AGENTS, HookSettings, settings_of
from snapshotd.errors import Conflict, UsageError

SOCKET = Path("/run/snapshotd/hooks-x.sock")
OTHERS = {
    "model": "opus",
    "permissions": {"allow": ["Bash(ls:*)"]},
    "hooks": {
        "PreToolUse": [{"matcher": "Bash", "hooks": [{"type": "command", "command": "lint"}]}],
        "Stop": [{"hooks": [{"type": "command", "command": "say done"}]}],
    },
}


@pytest.fixture(params=list(AGENTS))
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> HookSettings:
    return settings_of(request.param, SOCKET, tmp_path)


def test_what_is_there_stays_and_comes_back(settings: HookSettings) -> None:
    settings.file.parent.mkdir()
    settings.file.write_text(json.dumps(OTHERS))
    settings.file.chmod(0o600)
    assert settings.install()
    found = json.loads(settings.file.read_text())
    assert {key: found[key] for key in ("model", "permissions")} == {
        key: OTHERS[key] for key in ("model", "permissions")
    }
    assert "lint" in json.dumps(found["hooks"]["PreToolUse"])
    assert "say done" in json.dumps(found["hooks"]["Stop"])
    assert settings.installed()
    assert settings.file.stat().st_mode & 0o777 == 0o600
    assert not settings.install(), "the second time there is nothing to do"
    assert json.loads(settings.file.read_text()) == found
    assert settings.remove()
    assert json.loads(settings.file.read_text()) == OTHERS
    assert not settings.remove()
    assert not settings.installed()


def test_a_file_of_ours_alone_goes(settings: HookSettings, tmp_path: Path) -> None:
    assert settings.install()
    assert settings.remove()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in tmp_path.rglob("commands")], "nor are its folders left"


def test_a_command_of_the_user_stays(tmp_path: Path) -> None:
    own = tmp_path / ".claude" / "commands" / "own.md"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    settings = settings_of("claude", SOCKET, tmp_path)
    assert settings.install()
    assert settings.remove()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]


def test_hooks_of_another_installation_are_replaced(settings: HookSettings) -> None:
    settings.install()
    text = settings.file.read_text()
    settings.file.write_text(text.replace(str(SOCKET), "/run/snapshotd/hooks-old.sock"))
    assert not settings.installed()
    assert settings.install()
    assert settings.file.read_text() == text


@pytest.mark.parametrize("text", ["{", "[]", '{"hooks": []}', '{"hooks": {"Stop": {}}}', "\ufeff{}"])
def test_a_file_in_another_form_is_left_alone(settings: HookSettings, text: str) -> None:
    settings.file.parent.mkdir()
    settings.file.write_text(text)
    with pytest.raises(Conflict, match=str(settings.file)):
        settings.install()
    assert settings.file.read_text() == text


def test_a_link_to_settings_stays_a_link(settings: HookSettings, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text('{"model": "x"}')
    place = tmp_path / settings.agent.file
    place.parent.mkdir()
    place.symlink_to(real)
    settings.install()
    assert place.is_symlink()
    assert json.loads(real.read_text())["hooks"]


def test_the_command_of_a_hook_never_fails(settings: HookSettings, tmp_path: Path) -> None:
    """Without a daemon, without the program, and in a folder that is gone."""
    for command in (settings.command, settings.command.replace("send.py", "gone.py")):
        done = subprocess.run(
            ["sh", "-c", command], input="{}", capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert (done.returncode, done.stdout) == (0, "")
        assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        settings_of("claude", SOCKET, tmp_path / "missing")
    with pytest.raises(UsageError, match="choose claude"):
        settings_of("emacs", SOCKET, tmp_path)
