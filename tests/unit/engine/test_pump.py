"""Output reaches the repository and the watcher whole; what outlives the command neither holds it up nor breaks."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.pump import Outcome, pump
from snapshotd.repo.base import Spool
from snapshotd.repo.spool import FileSpool
from snapshotd.runtime.base import Process
from snapshotd.secrets.redactor import Funnel, Redactor
from snapshotd.secrets.vault import FileVault
from snapshotd.types import BlobID, TrajectoryID, new_id

SECRET = "correct-horse-battery"


class Shell(Process):
    """A real command on this machine, with pipes straight from it."""

    def __init__(self, script: str) -> None:
        self._child = subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self.pid = self._child.pid
        self.stdout_fd, self.stderr_fd = os.dup(self._child.stdout.fileno()), os.dup(self._child.stderr.fileno())
        self._child.stdout.close()
        self._child.stderr.close()

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self._child.wait(timeout_s)

    def kill(self) -> None:
        self._child.kill()


@pytest.fixture
def repo(tmp_path: Path) -> Spool:
    return FileSpool(tmp_path / "repo")


@pytest.fixture
def funnel(tmp_path: Path) -> Iterator[Funnel]:
    vault = FileVault(tmp_path)
    yield Redactor(vault).funnel(TrajectoryID(new_id()), {"env-PASSWORD": SECRET})
    vault.close()


def _read(repo: Spool, blob: BlobID | None) -> bytes:
    return b"" if blob is None else b"".join(repo.load_blob(blob))


def _run(repo: Spool, funnel: Funnel, script: str) -> tuple[Outcome, dict[str, bytes]]:
    seen = {"stdout": b"", "stderr": b""}

    def sink(stream: str, data: bytes) -> None:
        seen[stream] += data

    return pump(Shell(script), repo, funnel, sink), seen


def test_both_streams_and_the_exit_code(repo: Spool, funnel: Funnel) -> None:
    outcome, seen = _run(repo, funnel, "echo out; echo err >&2; exit 7")
    assert outcome.exit_code == 7
    assert (_read(repo, outcome.stdout), _read(repo, outcome.stderr)) == (b"out\n", b"err\n")
    assert seen == {"stdout": b"out\n", "stderr": b"err\n"}


def test_a_secret_is_neither_kept_nor_shown_wherever_it_is_cut(repo: Spool, funnel: Funnel) -> None:
    outcome, seen = _run(repo, funnel, f"printf 'a {SECRET[:5]}'; sleep 0.2; printf '{SECRET[5:]} b'; echo {SECRET} >&2")
    for data in (_read(repo, outcome.stdout), _read(repo, outcome.stderr), *seen.values()):
        assert SECRET.encode() not in data
        assert b"[secret:env-PASSWORD:" in data
    assert b"".join(funnel.reveal_stream([seen["stdout"]])) == f"a {SECRET} b".encode()


def test_silence_makes_no_blob(repo: Spool, funnel: Funnel) -> None:
    outcome, _ = _run(repo, funnel, "true")
    assert (outcome.stdout, outcome.stderr) == (None, None)
    assert list(repo.blobs()) == []


def test_large_output_is_whole(repo: Spool, funnel: Funnel) -> None:
    outcome, seen = _run(repo, funnel, "yes 0123456789 | head -c 20000000")
    assert outcome.stdout is not None
    assert repo.size_bytes(outcome.stdout) == 20_000_000
    assert _read(repo, outcome.stdout) == seen["stdout"]


def test_what_is_in_the_pipe_at_the_end_is_not_lost(repo: Spool, funnel: Funnel) -> None:
    for _ in range(20):
        outcome, _ = _run(repo, funnel, "(sleep 5) & head -c 60000 /dev/zero")
        assert len(_read(repo, outcome.stdout)) == 60_000


def test_a_noisy_background_child_neither_delays_nor_meets_a_broken_pipe(repo: Spool, funnel: Funnel, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    started = time.monotonic()
    outcome, _ = _run(repo, funnel, f"(for i in $(seq 60); do echo noise; sleep 0.05; done; touch {alive}) & echo done")
    assert time.monotonic() - started < 2.5, "the child makes noise for 3 s"
    assert outcome.exit_code == 0
    assert b"done\n" in _read(repo, outcome.stdout)
    deadline = time.monotonic() + 30
    while not alive.exists():
        assert time.monotonic() < deadline, "the child died of SIGPIPE"
        time.sleep(0.05)


def test_a_watcher_that_fails_ends_the_command(repo: Spool, funnel: Funnel) -> None:
    shell = Shell("while :; do echo x; done")

    def broken(stream: str, data: bytes) -> None:
        raise RuntimeError("watcher")

    with pytest.raises(RuntimeError, match="watcher"):
        pump(shell, repo, funnel, broken)
    assert shell.wait(10) == -9
    assert list(repo.blobs()) == []
