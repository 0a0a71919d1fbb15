"""A tree of processes that is stopped as one, and from which nothing gets out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import landlock
from snapshotd.kernel.holding.process_tree import ProcessTree
from snapshotd.kernel.processes import stat_fields

_FIRST = r"""
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # child subreaper
shell = subprocess.Popen(["sh", "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(shell.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""
_DAEMON = "setsid sh -c 'echo $$; while :; do :; done' & exit"


@pytest.fixture
def tree() -> Iterator[tuple[ProcessTree, int]]:
    """A tree, and a process in it that its parents have left."""
    first = subprocess.Popen(
        [sys.executable, "-c", _FIRST, _DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout is not None
        daemon = int(first.stdout.readline())
        found = ProcessTree(first.pid)
        yield found, daemon
        for pid in found.members()[1:]:
            os.kill(pid, signal.SIGKILL)


def test_a_daemon_stays_below_and_stands_still(tree: tuple[ProcessTree, int]) -> None:
    found, daemon = tree
    assert daemon in found.members()
    assert found.has(daemon)
    assert not found.has(os.getpid())
    found.freeze()
    before = stat_fields(daemon)
    assert before[0] == b"T"
    assert stat_fields(daemon)[11:13] == before[11:13], "it takes no time"
    assert stat_fields(found.first)[0] != b"T"
    found.thaw()
    assert stat_fields(daemon)[0] != b"T"


def test_one_that_was_stopped_before_stays_so(tree: tuple[ProcessTree, int]) -> None:
    found, daemon = tree
    os.kill(daemon, signal.SIGSTOP)
    while stat_fields(daemon)[0] != b"T":
        os.sched_yield()
    found.freeze()
    found.thaw()
    assert stat_fields(daemon)[0] == b"T"


def test_without_its_first_process_it_is_gone() -> None:
    first = subprocess.Popen(["sleep", "1000"])
    found = ProcessTree(first.pid)
    first.kill()
    first.wait()
    with pytest.raises(SandboxFailed, match="was killed"):
        found.members()


@pytest.mark.skipif(
    landlock.version() < landlock.NEEDED, reason="this kernel has no Landlock that renames are made under"
)
def test_a_confined_process_writes_in_its_directories_alone(tmp_path: object) -> None:
    script = r"""
import os, sys
from snapshotd.kernel import landlock
inside, outside = sys.argv[1] + "/inside", sys.argv[1] + "/outside"
os.mkdir(inside), os.mkdir(inside + "/d"), os.mkdir(outside)
assert landlock.confine([inside])
open(inside + "/f", "w").close()
os.rename(inside + "/f", inside + "/d/f")
open("/dev/null", "w").write("x")
for refused in (lambda: open(outside + "/f", "w"), lambda: os.mkdir(outside + "/d"), lambda: os.rmdir(outside)):
    try:
        refused()
    except OSError:
        continue
    raise SystemExit("it was not refused")
os.listdir(outside)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
