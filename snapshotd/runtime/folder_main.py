"""The first process of a sandbox that is a plain folder: parent of its commands. Started by folder.py, which is also the
only one to speak to it.

    python -I -S folder_main.py SOCKET FOLDER [user]

SOCKET is an inherited descriptor. When its other end, the daemon's, closes, everything below this process is killed, and
it ends. It is a child subreaper in a session of its own, so nothing that a command starts gets out
from below it. Where the kernel has Landlock, it and all that it starts write below FOLDER and /dev/shm alone. With the
word `user` they have none of the rights that the daemon has in its user namespace (rootless.py).

A request is one packet with descriptors beside it: a file in memory with a JSON object (`argv`, `cwd`, `env`, `terminal`),
standard input, output and error, and the end to write to of a pipe, into which the exit code is written. One answer each:
`pid`; or `error`, an errno, with `directory` true if it is the working directory's. The first packet comes from here and
has no fields but `confined`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import termios
from typing import Any

if __name__ == "__main__":  # -I and -S leave nothing but the standard library to import from
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))

from snapshotd.kernel import landlock, passing
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.processes import descendants

ANSWER_MAX_BYTES = 1 << 16
_DESCRIPTORS = 5
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


class FirstProcess:
    """See the module's text."""

    def __init__(self, daemon: socket.socket) -> None:
        self._daemon = daemon
        self._ends: dict[int, int] = {}
        """Process id of a command to the pipe for its exit code."""
        self._selector = selectors.DefaultSelector()
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in _IGNORED:
            signal.signal(number, lambda *_: None)  # a handler, which its commands do not inherit
        self._selector.register(read_end, selectors.EVENT_READ, lambda: bool(os.read(read_end, 4096)))
        self._selector.register(daemon, selectors.EVENT_READ, self._serve)

    def run(self) -> None:
        """Serve until the daemon's end closes, then end what is left."""
        while all(key.data() for key, _ in self._selector.select()):
            self._reap()
        while pids := descendants(os.getpid()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)

    def _serve(self) -> bool:
        """One request. False: the daemon is gone, or ends the sandbox."""
        data, fds = passing.receive(self._daemon, 1, _DESCRIPTORS)
        try:
            if not data:
                return False
            request, stdin, stdout, stderr, end = fds
            answer = self._start(passing.read_document(request), (stdin, stdout, stderr), end)
            if "pid" in answer:
                fds.remove(end)
            self._daemon.send(json.dumps(answer).encode())
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, wanted: dict[str, Any], standard: tuple[int, int, int], end: int) -> dict[str, Any]:
        controlling = (lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if wanted["terminal"] else None
        try:
            process = subprocess.Popen(
                wanted["argv"],
                cwd=wanted["cwd"],
                env=wanted["env"],
                stdin=standard[0],
                stdout=standard[1],
                stderr=standard[2],
                start_new_session=True,
                preexec_fn=controlling,
            )
        except OSError as exc:
            return {"error": exc.errno, "directory": exc.filename == wanted["cwd"]}
        process.returncode = 0  # `_reap` waits for it
        self._ends[process.pid] = end
        return {"pid": process.pid}

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                end = self._ends.pop(found[0], -1)
                if end >= 0:
                    code = os.waitstatus_to_exitcode(found[1])
                    with contextlib.suppress(BrokenPipeError):  # the daemon does not wait for it any more
                        os.write(end, str(code if code >= 0 else 128 - code).encode())
                    os.close(end)


def main(descriptor: str, folder: str, user: str = "") -> None:
    """Become the first process of a sandbox. See the module's text."""
    if user:
        from snapshotd.kernel import rootless  # only then: it imports much

        rootless.leave_rights()
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    daemon = socket.socket(fileno=int(descriptor))
    daemon.set_inheritable(False)
    confined = landlock.confine([folder, *filter(os.path.isdir, ["/dev/shm"])])
    daemon.send(json.dumps({"confined": confined}).encode())
    FirstProcess(daemon).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
