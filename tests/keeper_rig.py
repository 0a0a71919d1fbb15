"""What tests of the keeper share: helpers that leave commands behind as `runc exec --detach` does, and daemons that are
killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from snapshotd.runtime import keeper_main
from snapshotd.runtime.keeper import KeeperClient

DEADLINE_S = 60.0
_HELPER = """
import os, signal, sys
script, pid_file, then = sys.argv[1:]
middle = os.fork()
if middle == 0:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execlp("sh", "sh", "-c", script)
    with open(pid_file, "w") as f:
        f.write(str(pid))
    os._exit(0)
os.waitpid(middle, 0)
os.execlp("sh", "sh", "-c", then, "sh", pid_file)
"""
"""The command loses its parent at once. Not a shell's work: that may reap a background command which ends quickly."""
_DAEMON = """
import os, pathlib, signal, socket, sys
from snapshotd.errors import SandboxFailed
from snapshotd.runtime.keeper import KeeperClient
from tests import keeper_rig
path = pathlib.Path(sys.argv[1])
keeper = KeeperClient(path)
"""


def eventually(true: Callable[[], object], what: str) -> None:
    """Wait until something holds; AssertionError after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def keepers(path: Path) -> list[int]:
    """Process ids of the keepers with this socket."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # ended meanwhile
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if name.isdigit() else []
            if str(path).encode() in words and keeper_main.__file__.encode() in words:
                found.append(int(name))
    return found


@contextlib.contextmanager
def pipes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Two, closed at the end."""
    ends = os.pipe(), os.pipe()
    try:
        yield ends
    finally:
        for pair in ends:
            for fd in pair:
                os.close(fd)


def run(
    keeper: KeeperClient, key: str, script: str, *, then: str = "exit 0", timeout_s: float = DEADLINE_S
) -> int | None:
    """Have a helper leave `script` (sh) behind under `key` and do `then` (sh; `$1` is the file with the process id).
    Its exit code."""
    pid_file = keeper._path.parent.parent / f"pid-{key}"
    with pipes() as (stdout, stderr):
        argv = [sys.executable, "-I", "-S", "-c", _HELPER, script, str(pid_file), then]
        return keeper.run(key, argv, pid_file, (*stdout, *stderr), timeout_s)


def read_end(fd: int) -> bytes:
    """Everything to the end; closes the descriptor."""
    with open(fd, "rb") as stream:
        return stream.read()


def killed_daemon(path: Path, body: str) -> list[str]:
    """Run `body` in a process that has a `keeper` with its socket at `path`, kill it with SIGKILL; what it printed
    before."""
    script = _DAEMON + textwrap.dedent(body) + "\nprint('done', flush=True)\nsys.stdin.read()\n"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as daemon:
        assert daemon.stdout is not None
        lines = []
        while (line := daemon.stdout.readline()) not in ("done\n", ""):
            lines.append(line.rstrip("\n"))
        daemon.kill()
    assert line == "done\n", f"the stand-in daemon failed after {lines}"
    return lines
