"""Output reaches the repository and the watcher whole; what outlives the command neither holds it up nor breaks."""

from __future__ import annotations

import json
import mmap
import os
import select
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.base import Stream
from snapshotd.engine.caller import Caller
from snapshotd.engine.sandbox.kept import Intake, memory
from snapshotd.engine.sandbox.pump import CommandOutcome, Printed, Shown
from snapshotd.engine.sandbox.pump import pump as pump_to
from snapshotd.repo.spool import Spool
from snapshotd.runtime.base import Process
from snapshotd.secrets.redactor import Funnel, Redactor
from snapshotd.secrets.vault import Vault
from snapshotd.types import BlobID, TrajectoryID, new_id

SECRET = "correct-horse-battery"
Follow = Callable[[str, str, int], tuple[bytes, bytes]]
_TRAJECTORY = TrajectoryID(new_id())


class Shell(Process):
    """A real command on this machine, with pipes straight from it."""

    def __init__(self, script: str, *, stdin: bool = False) -> None:
        self._child = subprocess.Popen(
            ["sh", "-c", script],
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._child.stdin is not None:
            self.stdin_fd = os.dup(self._child.stdin.fileno())
            self._child.stdin.close()
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self.pid = self._child.pid
        self.stdout_fd, self.stderr_fd = os.dup(self._child.stdout.fileno()), os.dup(self._child.stderr.fileno())
        self._child.stdout.close()
        self._child.stderr.close()

        self._pidfd = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._pidfd)

    def end_fd(self) -> int:
        return self._pidfd

    def wait(self, timeout_s: float | None = None) -> int | None:
        return self._child.wait(timeout_s)

    def kill(self) -> None:
        self._child.kill()


@pytest.fixture
def repo(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "repo")


@pytest.fixture
def funnel(tmp_path: Path) -> Iterator[Funnel]:
    vault = Vault(tmp_path)
    yield _funnel(vault)
    vault.close()


def _funnel(vault: Vault) -> Funnel:
    return Redactor(vault).funnel(_TRAJECTORY, {"env-PASSWORD": SECRET})


def _read(repo: Spool, blob: BlobID | None) -> bytes:
    return b"" if blob is None else b"".join(repo.load_blob(blob))


def pump(
    process: Process, repo: Spool, funnel: Funnel, show: Shown, *, max_bytes: int = 1 << 30, **rest: Any
) -> CommandOutcome:
    return pump_to(process, funnel, show, spool=repo, max_bytes=max_bytes, **rest)


def _run(repo: Spool, funnel: Funnel, script: str, **rest: Any) -> tuple[CommandOutcome, dict[str, bytes]]:
    seen = {"stdout": b"", "stderr": b""}

    def sink(stream: str, data: bytes, _: int) -> None:
        seen[stream] += data

    return pump(Shell(script), repo, funnel, sink, **rest), seen


def test_both_streams_and_the_exit_code(repo: Spool, funnel: Funnel) -> None:
    outcome, seen = _run(repo, funnel, "echo out; echo err >&2; exit 7")
    assert outcome.exit_code == 7
    assert (_read(repo, outcome.stdout), _read(repo, outcome.stderr)) == (b"out\n", b"err\n")
    assert seen == {"stdout": b"out\n", "stderr": b"err\n"}


def test_a_secret_is_neither_kept_nor_shown_wherever_it_is_cut(repo: Spool, funnel: Funnel) -> None:
    outcome, seen = _run(
        repo, funnel, f"printf 'a {SECRET[:5]}'; sleep 0.2; printf '{SECRET[5:]} b'; echo {SECRET} >&2"
    )
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


def test_input_is_passed_on_as_far_as_it_is_taken(repo: Spool, funnel: Funnel) -> None:
    taken: list[int] = []
    caller = Caller(gives_input=True)
    caller.on_taken(taken.append)
    data = os.urandom(1_000_000)  # more than a pipe holds
    caller.send(data[:10])
    caller.send(data[10:])
    caller.end_input()
    outcome = pump(Shell("cat", stdin=True), repo, funnel, lambda *_: None, caller=caller)
    assert _read(repo, outcome.stdout) == data
    assert sum(taken) == len(data)
    caller = Caller(gives_input=True)
    caller.on_taken(taken.append)
    caller.send(data)
    outcome = pump(Shell("head -c 5; exit 3", stdin=True), repo, funnel, lambda *_: None, caller=caller)
    assert (outcome.exit_code, _read(repo, outcome.stdout)) == (3, data[:5]), (
        "an input that was neither read nor ended holds nothing up"
    )


def test_a_stream_that_nobody_reads_is_a_broken_pipe(repo: Spool, funnel: Funnel) -> None:
    caller = Caller()
    seen: list[str] = []

    def show(stream: str, data: bytes, _: int) -> None:
        seen.append(stream)
        caller.close_output("stdout")

    outcome = pump(Shell("yes; echo $? >&2; echo more >&2; exit 4"), repo, funnel, show, caller=caller)
    assert outcome.exit_code == 4
    assert _read(repo, outcome.stderr).endswith(b"more\n")
    assert seen[0] == "stdout"


@pytest.mark.parametrize("abandon", [False, True])
def test_a_command_goes_on_without_its_caller_unless_it_is_to_be_abandoned(
    repo: Spool, funnel: Funnel, abandon: bool
) -> None:
    caller = Caller()
    caller.leave()
    command = Shell(f"exec sleep {1000 if abandon else 0.2}")
    outcome = pump(command, repo, funnel, lambda *_: None, caller=caller, abandon=abandon)
    assert outcome.exit_code == (-9 if abandon else 0)


def test_what_is_beyond_the_limit_is_counted(repo: Spool, funnel: Funnel) -> None:
    outcome, seen = _run(repo, funnel, "head -c 3000000 /dev/zero; echo short >&2", max_bytes=1_000_000)
    kept = _read(repo, outcome.stdout)
    assert 1_000_000 <= len(kept) < 1_100_000
    assert outcome.lost_bytes == {"stdout": 3_000_000 - len(kept)}
    assert len(seen["stdout"]) == 3_000_000


def test_what_is_neither_shown_nor_in_memory_is_counted(repo: Spool, funnel: Funnel) -> None:
    """A daemon's record of a run was full, it showed more and gave that back; then it died."""
    intakes: dict[Stream, Intake] = {"stdout": Intake(memory()), "stderr": Intake(memory())}
    read_end, write_end = os.pipe()
    os.write(write_end, b"x" * 40_000)
    intakes["stdout"].move(read_end, 40_000)
    intakes["stdout"].give_back(36_000)
    outcome = pump(
        Shell("echo more"),
        repo,
        funnel,
        lambda *_: None,
        intakes=intakes,
        earlier=[Printed("stdout", b"x" * 10_000, 10_000)],
    )
    kept = _read(repo, outcome.stdout)
    assert outcome.lost_bytes == {"stdout": 40_005 - len(kept)}
    assert kept == b"x" * (len(kept) - 5) + b"more\n"
    assert 14_000 <= len(kept) < 19_000
    for fd in (read_end, write_end):
        os.close(fd)
    for intake in intakes.values():
        intake.close()


def test_what_is_in_the_pipe_at_the_end_is_not_lost(repo: Spool, funnel: Funnel) -> None:
    for _ in range(20):
        outcome, _ = _run(repo, funnel, "(sleep 5) & head -c 60000 /dev/zero")
        assert len(_read(repo, outcome.stdout)) == 60_000


def test_a_noisy_background_child_neither_delays_nor_meets_a_broken_pipe(
    repo: Spool, funnel: Funnel, tmp_path: Path
) -> None:
    go, alive = tmp_path / "go", tmp_path / "alive"
    noise = f"for i in $(seq 1200); do echo noise; test -e {go} && break; sleep 0.05; done; echo more; touch {alive}"
    outcome, _ = _run(repo, funnel, f"({noise}) & echo done")
    assert not alive.exists(), "the child makes noise until it is told"
    go.touch()
    assert outcome.exit_code == 0
    assert b"done\n" in _read(repo, outcome.stdout)
    deadline = time.monotonic() + 60
    while not alive.exists():
        assert time.monotonic() < deadline, "the child died of SIGPIPE"
        time.sleep(0.05)


def test_a_watcher_that_fails_ends_the_command(repo: Spool, funnel: Funnel) -> None:
    shell = Shell("while :; do echo x; done")

    def broken(stream: str, data: bytes, _: int) -> None:
        raise RuntimeError("watcher")

    with pytest.raises(RuntimeError, match="watcher"):
        pump(shell, repo, funnel, broken)
    assert shell.wait(60) == -9
    assert list(repo.blobs()) == []


# -- beyond the daemon -------------------------------------------------------------------------------------------------


class Program(Shell):
    """Another daemon is not its parent."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        assert timeout_s is None
        fd = os.pidfd_open(self.pid)
        select.select([fd], [], [])
        os.close(fd)
        return 0


@pytest.fixture
def follow(tmp_path: Path) -> Follow:
    """Have daemons, processes of their own, follow a program until it ends. All but the last die when they meet
    `die_at`, which is before or behind a record, for the `after`th time. What they recorded of its output, and what the
    last has saved."""

    def follow(script: str, die_at: str, after: int) -> tuple[bytes, bytes]:
        record, saved = tmp_path / "record", tmp_path / "saved"
        record.touch()  # the program looks at it
        program = Program(script)
        kept = {"stdout": memory(), "stderr": memory()}
        for deaths in (after, after, after, 0):
            child = os.fork()
            if child == 0:
                try:
                    _daemon(program, kept, record, saved, die_at, deaths)
                finally:
                    os._exit(1)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == (9 if deaths else 0)
        for fd in kept.values():
            assert os.fstat(fd).st_blocks * 512 <= 2 * mmap.PAGESIZE, "what is recorded takes no memory"
            os.close(fd)
        os.close(program.stdout_fd)
        os.close(program.stderr_fd)
        assert Shell.wait(program, 10) == 0
        return b"".join(piece.data for piece in _recorded(record) if piece.stream == "stdout"), saved.read_bytes()

    return follow


def _daemon(program: Program, kept: dict[Stream, int], record: Path, saved: Path, die_at: str, deaths: int) -> None:
    times = 0

    def met(where: str) -> None:
        nonlocal times
        times += where == die_at
        if times == deaths != 0:
            os._exit(9)

    def show(stream: Stream, data: bytes, shown_bytes: int) -> None:
        met("before")
        with record.open("a") as log:
            log.write(json.dumps([stream, data.hex(), shown_bytes]) + "\n")
        met("behind")

    vault = Vault(record.parent)
    repo = Spool(record.parent / "repo")
    intakes: dict[Stream, Intake] = {"stdout": Intake(kept["stdout"]), "stderr": Intake(kept["stderr"])}
    outcome = pump(program, repo, _funnel(vault), show, intakes=intakes, earlier=_recorded(record))
    saved.write_bytes(_read(repo, outcome.stdout))
    os._exit(0)


def _recorded(record: Path) -> list[Printed]:
    lines = map(json.loads, record.read_text().splitlines())
    return [Printed(stream, bytes.fromhex(data), shown_bytes) for stream, data, shown_bytes in lines]


@pytest.mark.parametrize("die_at", ["before", "behind"])
def test_daemons_that_die_lose_nothing_and_show_nothing_twice(follow: Follow, die_at: str) -> None:
    recorded, saved = follow("seq 200000 | sed 's/^/the same line\\n/'", die_at, 5)
    assert recorded == saved == b"".join(b"the same line\n%d\n" % number for number in range(1, 200_001))


@pytest.mark.parametrize("die_at", ["before", "behind"])
def test_what_is_held_back_is_there_for_the_next_daemon(follow: Follow, tmp_path: Path, die_at: str) -> None:
    half, rest = SECRET[:9], SECRET[9:]
    size = f"$(stat -c %s {tmp_path / 'record'})"
    recorded_some = f"until [ {size} -gt $before ]; do sleep 0.002; done"  # so each time there is a piece of its own
    script = f"for i in $(seq 40); do before={size}; echo $i; printf {half}; {recorded_some}; echo {rest}; done"
    recorded, saved = follow(script, die_at, 5)
    vault = Vault(tmp_path)
    revealed = b"".join(_funnel(vault).reveal_stream([recorded]))
    vault.close()
    assert revealed.decode().splitlines() == [line for number in range(1, 41) for line in (str(number), SECRET)]
    assert SECRET.encode() not in recorded
    assert saved == recorded


def test_much_more_than_is_recorded() -> None:
    """What was given back without being recorded is not there as zeros."""
    intake = Intake(memory())
    read_end, write_end = os.pipe()
    for number in range(20):
        os.write(write_end, b"%04d" % number * 2048)
        assert intake.move(read_end, 1 << 16) == b"%04d" % number * 2048
    intake.give_back(19 * 8192 + 100)
    assert intake.rest(8192) == b"0019" * 2048
    assert intake.rest(20 * 8192) == b""
    os.close(write_end)
    assert intake.move(read_end, 1 << 16) == b""
    os.close(read_end)
    intake.close()
