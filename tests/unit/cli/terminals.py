"""Command lines on a terminal of their own, where somebody answers."""

from __future__ import annotations

import pty
import select
import subprocess
import sys
import time

from tests.unit.daemon.process import Daemon, environment


def answered(daemon: Daemon, words: list[str], answer: str) -> tuple[int, str]:
    """Run a command line on a terminal of its own, and answer its question. Exit code, and all that it shows."""
    ours, theirs = pty.openpty()
    with open(ours, "r+b", buffering=0) as terminal:
        with open(theirs, "r+b", buffering=0) as tty:
            argv = [sys.executable, "-m", "snapshotd", *words]
            running = subprocess.Popen(
                argv, env=environment(daemon), stdin=tty, stdout=tty, stderr=tty, start_new_session=True
            )
        said = b""
        try:
            while select.select([terminal], [], [], 60)[0]:
                try:
                    said += terminal.read(4096)
                except OSError:
                    break  # EIO: nobody has the other side open any more
                if said.endswith(b"[y/N] "):
                    terminal.write(answer.encode())
            return running.wait(60), said.decode()
        finally:
            running.kill()
            running.wait(20)


def edit_on_terminal(daemon: Daemon, command: str, answers: str = "", *options: str) -> tuple[int, str]:
    """`snapshotd edit` where everything is a terminal, and each question gets the next answer; its exit code and what
    it says."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "snapshotd", "edit", "box", *options]
    env = {**environment(daemon), "EDITOR": command, "VISUAL": command}
    with open(ours, "r+b", buffering=0) as terminal:
        with open(theirs, "r+b", buffering=0) as tty:
            running = subprocess.Popen(argv, env=env, stdin=tty, stdout=tty, stderr=tty, start_new_session=True)
        said, left = b"", list(answers)
        deadline = time.monotonic() + 60
        try:
            while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                try:
                    said += terminal.read(4096)
                except OSError:
                    break  # EIO: nobody has the other side open any more
                if said.count(b"[Y/n] ") > len(answers) - len(left):
                    terminal.write(left.pop(0).encode() + b"\n")
            return running.wait(max(0.0, deadline - time.monotonic())), said.decode()
        finally:
            running.kill()
            running.wait(20)
