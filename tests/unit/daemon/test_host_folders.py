"""Folders of this machine that a request names: what cannot be one is refused with a sentence, and nothing is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.daemon.asking import ask
from tests.unit.daemon.process import Daemon


@pytest.fixture(scope="module")
def snapshot(shared_daemon: Daemon) -> str:
    status, made = ask(shared_daemon, "POST", "/sandboxes", {"name": "restored"})
    assert status == 201
    return str(made["snapshot"]["id"])


def _refusal(daemon: Daemon, path: str, body: dict[str, str]) -> str:
    status, answer = ask(daemon, "POST", path, body)
    assert (status, answer["error"]["code"]) == (400, "UsageError"), answer
    return str(answer["error"]["message"])


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("/proc/x", "'/proc/x': no directory can be made there (No such file or directory); name one in another place"),
        ("/proc/self/x", "no directory can be made there"),
        ("/sys/x", "no directory can be made there"),
        ("/", "must be an absolute path that ends with the name of a directory"),
        ("/tmp/..", "must be an absolute path that ends with the name of a directory"),
        ("/tmp/" + "x" * 300, "(File name too long); name one in another place"),
        ("/dev/null/x", "its parent directory cannot be opened (Not a directory)"),
        ("/tmp/a\0b", "has a zero byte, which no path can have"),
    ],
    ids=lambda value: value[:20],
)
def test_a_restore_to_no_place_for_a_directory(shared_daemon: Daemon, snapshot: str, to: str, why: str) -> None:
    assert why in _refusal(shared_daemon, f"/snapshots/{snapshot}/restore", {"to": to})


@pytest.mark.parametrize("where", ["", "layers", "repo/store"])
def test_a_restore_into_the_daemons_own_directory(shared_daemon: Daemon, snapshot: str, where: str) -> None:
    inside = shared_daemon.state_dir / where
    before = sorted(os.listdir(inside))
    said = _refusal(shared_daemon, f"/snapshots/{snapshot}/restore", {"to": str(inside / "x")})
    assert said == (
        f"'{inside / 'x'}' lies in {shared_daemon.state_dir}, where the daemon keeps its own files; name another place"
    )
    assert sorted(os.listdir(inside)) == before


def test_the_way_there_does_not_matter(shared_daemon: Daemon, snapshot: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(shared_daemon.state_dir / "layers")
    assert "lies in" in _refusal(shared_daemon, f"/snapshots/{snapshot}/restore", {"to": str(tmp_path / "link/x")})


def test_a_mount_in_the_daemons_own_directory(shared_daemon: Daemon) -> None:
    empty = shared_daemon.state_dir / "empty"
    empty.mkdir()
    try:
        assert "lies in" in _refusal(shared_daemon, "/mount", {"directory": str(empty)})
    finally:
        empty.rmdir()


@pytest.mark.parametrize("length", [150, 201, 255])
def test_a_long_name_is_a_name(shared_daemon: Daemon, snapshot: str, tmp_path: Path, length: int) -> None:
    to = tmp_path / ("é" * (length // 2) + "x" * (length % 2))
    assert ask(shared_daemon, "POST", f"/snapshots/{snapshot}/restore", {"to": str(to)})[0] == 200
    assert os.listdir(tmp_path) == [to.name]
