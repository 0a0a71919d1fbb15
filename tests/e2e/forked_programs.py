"""Python programs that import much, without a new import each time: a process that has imported it forks one on request.

LangGraph is 0.7 s of CPU to import, and a program that is killed five times would be five of them. A program that is
forked has its own environment, working directory, output and exit code, and dies alone.

This file is also the program that forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_CODE = struct.Struct("=i")
_MAX_REQUEST_BYTES = 1 << 16
ROOT = Path(__file__).resolve().parents[2]


# -- for tests ---------------------------------------------------------------------------------------------------------


class Running:
    """A program that was started. `stdout`: what it prints, as it comes."""

    def __init__(self, stdout: int, stderr: int, code: int) -> None:
        self.stdout = open(stdout)  # noqa: SIM115 - until `wait`
        self._stderr, self._code = open(stderr), open(code, "rb")  # noqa: SIM115

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Exit code (below 0: the signal that killed it) and what of its output nobody has read yet. Its standard
        error may hold no more than a pipe does."""
        with self.stdout, self._stderr, self._code:
            out, told, err = self.stdout.read(), self._code.read(), self._stderr.read()
        assert told, "the process that forks has died"
        return subprocess.CompletedProcess([], *_CODE.unpack(told), out, err)


class Forks:
    """Forks programs. `modules`: what they import, as far as it is worth it."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    def start(self, program: Path, *args: object, env: Mapping[str, str], cwd: Path = ROOT) -> Running:
        words = [str(program), *map(str, args)]
        pipes = [os.pipe() for _ in range(3)]
        request = json.dumps([words, dict(env), str(cwd)])
        socket.send_fds(self._requests, [request.encode("utf-8", "surrogateescape")], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        return Running(*(read for read, _ in pipes))

    def run(
        self, program: Path, *args: object, env: Mapping[str, str], cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        return self.start(program, *args, env=env, cwd=cwd).wait()


@contextlib.contextmanager
def forks_with(modules: Sequence[str]) -> Iterator[Forks]:
    """A process that has imported these, and forks programs until the end."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            process = subprocess.Popen([sys.executable, "-P", __file__, *modules], stdin=its, cwd="/")
        with process:  # it ends when nobody can ask any more
            try:
                yield Forks(ours)
            finally:
                ours.close()
    assert process.returncode == 0


# -- the process that forks --------------------------------------------------------------------------------------------


def _main() -> None:
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
        if not data:
            return
        if os.fork() == 0:
            requests.close()
            _wait_for_a_child(json.loads(data), *fds)
        for fd in fds:
            os.close(fd)


def _wait_for_a_child(request: tuple[list[str], dict[str, str], str], out: int, err: int, told: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _be_program(*request, out, err)
    os.close(out)
    os.close(err)
    os.write(told, _CODE.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def _be_program(words: list[str], env: dict[str, str], cwd: str, out: int, err: int) -> None:
    from snapshotd import failpoints

    code: object = 1
    try:
        for fd, number in ((out, 1), (err, 2)):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        importlib.reload(failpoints)  # into the same names, which those who have imported `hit` see
        os.chdir(cwd)
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as exc:
        code = exc.code
    except BaseException:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


if __name__ == "__main__":
    _main()
