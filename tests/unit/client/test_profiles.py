"""The files that say what `snapshotd run NAME` runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from snapshotd.client.local import profiles
from snapshotd.gateway.base import ProviderKind


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own: empty, without keys."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for kind in ProviderKind:
        monkeypatch.delenv(f"{kind.upper()}_API_KEY", raising=False)
    place = tmp_path / "config" / "snapshotd" / "agents"
    place.mkdir(parents=True)
    return place


@pytest.mark.parametrize("name", sorted(path.stem for path in profiles.SHIPPED.glob("*.toml")))
def test_each_shipped_file_is_whole(name: str) -> None:
    profile = profiles.load(name)
    assert profile.npm or profile.pip, "it says where the program comes from"
    assert all("@" in package[1:] for package in profile.npm), "each package has its version"
    installed = [package[: package.index("@", 1)] for package in profile.npm]
    for program in re.findall(rf"{profiles.PLACE}/([\w@./-]+)", " ".join(profile.command)):
        assert program.startswith(tuple(f"{package}/" for package in installed)), "npm installs no optional package"
    assert all("==" in package for package in profile.pip)
    assert not any("{npm_arch}" in word or "{program}" in word for word in (*profile.command, *profile.npm))
    assert set(profile.providers) <= set(ProviderKind)
    page = (Path(__file__).parents[3] / "docs" / "agents-you-run.md").read_text()
    assert f"snapshotd run --workspace . {name} " in page


def test_a_file_of_the_user_goes_first(folders: Path) -> None:
    (folders / "codex.toml").write_text(f'folder = "{folders}"\ncommand = ["{{program}}/x"]\n')
    profile = profiles.load("codex")
    assert profile.command == (f"{profiles.PLACE}/x",)
    assert (profile.install(lambda _: None), profile.requirements(), profile.provider(())) == (folders, None, None)


def test_the_provider_is_the_named_one_or_that_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    aider = profiles.load("aider")
    assert aider.provider(()) == "anthropic", "the first"
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    assert aider.provider(()) == "openai"
    assert aider.provider(["anthropic"]) is None, "the user has named one of them"
    assert profiles.load("claude").provider(["openai"]) == "anthropic", "the user has named one that it cannot talk to"


def test_pip_gets_a_file_of_requirements(folders: Path) -> None:
    (folders / "mine.toml").write_text('pip = ["one==1", "two==2"]\ncommand = ["one"]\n')
    requirements = profiles.load("mine").requirements()
    assert requirements is not None
    assert requirements.read_text() == "one==1\ntwo==2\n"
    assert [path.name for path in requirements.parent.iterdir()] == ["mine.txt"]


def test_npm_installs_all_packages_of_a_list_once(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of npm writes down what it is asked for."""
    npm = folders / "npm"
    npm.write_text(
        f'#!/bin/sh\necho "$@" >> {folders}/asked\nwhile [ "$1" != --prefix ]; do shift; done\nmkdir "$2/node_modules"\n'
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folders}:{os.environ['PATH']}")
    (folders / "mine.toml").write_text('npm = ["one@1", "two-{npm_arch}@2"]\ncommand = ["one"]\n')
    profile = profiles.load("mine")
    told: list[object] = []
    first, second = profile.install(told.append), profile.install(told.append)
    assert first == second
    assert first is not None
    assert first.name == "node_modules"
    assert first.is_dir()
    asked = (folders / "asked").read_text().split()
    assert asked[-2:] == list(profile.npm)
    assert "--ignore-scripts" in asked
    assert len(told) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command = ['x']\nnpm = [3]", "lists of words"),
        ('command = ["x"]\npip = "a\\nb"', "lists of words"),
        ("command = ['x']\nnpm = 'a@1'\npip = 'b'", "take the others out"),
    ],
)
def test_a_malformed_file_is_told(folders: Path, text: str, says: str) -> None:
    (folders / "mine.toml").write_text(text)
    with pytest.raises(profiles.UsageError, match=says):
        profiles.load("mine")


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({"ANTHROPIC_BASE_URL": "http://h:1"}, {"anthropic": {"options": {"baseURL": "http://h:1/v1"}}}),
        ({"OPENAI_BASE_URL": "http://h:1/v1"}, {}),
    ],
)
def test_opencode_is_told_the_address_of_anthropic(tmp_path: Path, env: dict[str, str], wanted: object) -> None:
    """The shell of its profile, with a program in its place."""
    program = tmp_path / "opencode"
    program.write_text('#!/bin/sh\nprintf "%s\\n%s" "$OPENCODE_CONFIG_CONTENT" "$1"\n')
    program.chmod(0o755)
    shell, flag, script, name = profiles.load("opencode").command
    (line,) = [line for line in script.splitlines() if line.startswith("exec ")]
    script = script.replace(line.split()[1], str(program))
    done = subprocess.run([shell, flag, script, name, "word"], env=env, capture_output=True, text=True, check=True)
    config, word = done.stdout.split("\n")
    assert json.loads(config)["provider"] == wanted
    assert word == "word"
