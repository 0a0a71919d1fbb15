"""Another user of the machine, without rights, who talks to the hooks' socket as no agent does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOBODY = 65534
_LOOP = r"""
import array, contextlib, json, os, socket, sys, threading, time
SOCKET = sys.argv[1]

def connect(words=None, folder=None, data=b""):
    "A connection that has sent so much."
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.settimeout(60)
    s.connect(SOCKET)
    if words is not None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        head = b"\0".join(map(os.fsencode, words)) + b"\n"
        with contextlib.suppress(OSError):  # it may have answered before it had all, or refused the connection
            sent = s.sendmsg([head + data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            s.sendall((head + data)[sent:])
        os.close(fd)
    return s

def answer(s):
    "The exit code (None: the daemon hung up) and the text."
    found = b""
    try:
        while piece := s.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    s.close()
    return [found[0] if found else None, found[1:].decode(errors="replace")]

def ask(words, folder, data=""):
    s = connect(words, folder, data.encode())
    with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_WR)
    return answer(s)

def hook(folder, name, **more):
    event = {"session_id": "s", "hook_event_name": name, "tool_name": "Bash", "tool_input": {}, **more}
    return ask(["hook", "claude"], folder, json.dumps(event))

for line in sys.stdin:
    try:
        result = {"result": eval(line)}
    except Exception as exc:
        result = {"error": repr(exc)}
    print(json.dumps(result), flush=True)
"""


class Stranger:
    """A process of that user, until `close`."""

    def __init__(self, socket: Path, uid: int = NOBODY) -> None:
        self.uid = uid
        self._process = subprocess.Popen(
            ["/usr/bin/python3", "-I", "-c", _LOOP, str(socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            user=uid,
            group=uid,
            extra_groups=[],
            env={"PYTHONUTF8": "1"},
        )

    def __call__(self, expression: str) -> Any:
        """The value of a Python expression there, or the error that it raised, as text."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(expression + "\n")
        stdin.flush()
        found = json.loads(stdout.readline())
        return found["error"] if "error" in found else found["result"]

    def ask(self, folder: Path, *words: str, data: str = "") -> tuple[int | None, str]:
        """One request, as a slash command makes it."""
        code, text = self(f"ask({list(words)!r}, {os.fspath(folder)!r}, {data!r})")
        return code, text

    def hook(self, folder: Path, name: str, **more: Any) -> tuple[int | None, str]:
        """One event of an agent."""
        code, text = self(f"hook({os.fspath(folder)!r}, {name!r}, **{more!r})")
        return code, text

    def runs(self, statements: Sequence[str]) -> None:
        """Statements, which begin with no expression."""
        found = self("exec(" + repr("\n".join(statements)) + ", globals())")
        assert found is None, found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
