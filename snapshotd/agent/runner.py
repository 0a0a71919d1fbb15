"""`snapshotd-agent run`: one command as one tool call, its output passed through, streamed to the daemon and
recorded."""

from __future__ import annotations

import base64
import os
import selectors
import signal
import subprocess
import sys
from typing import Any, Dict, List, Optional

from snapshotd.agent.calls import put
from snapshotd.agent.replay import Replayed
from snapshotd.agent.session import session, warn
from snapshotd.agent.wire.link import Link
from snapshotd.agent.wire.values import clean, encode, plain

KEPT_BYTES = 8 << 20
"""Bytes of each stream in the recorded result; all of it is passed through and streamed."""
_PIECE_BYTES = 64 << 10
_POLL_S = 0.05
_VARIABLE_BYTES = 96 << 10
"""The kernel takes 128 KiB in one variable (MAX_ARG_STRLEN in execve(2))."""
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def run(fields: Dict[str, Any], command: List[str], arguments: Any) -> int:
    """Run a command as the call of `fields`. Returns its exit status as a shell counts it; in a replay the recorded
    one. Raises as `Session.request`. A command that cannot be run is recorded as failed, with the exit status that a
    shell gives it.

    The command finds its idempotency key in SNAPSHOTD_KEY and `arguments` as JSON in SNAPSHOTD_ARGUMENTS, as the
    approver left them, if they fit; without them, the command itself is recorded, and the approver may change it."""
    sent = {"command": [clean(part) for part in command]} if arguments is None else arguments
    body = put(fields, "arguments", sent)
    waiting = session.begin_call(fields, body)
    answer, connection = waiting.answer(), waiting.connection
    if "replayed" in answer:
        return _again(Replayed(answer))
    decided = answer.get("arguments", sent)
    if arguments is None:
        command = [str(part) for part in decided["command"]]
    environment = dict(os.environ, SNAPSHOTD_KEY=answer.get("key", ""))
    encoded = encode(decided)
    if len(encoded) <= _VARIABLE_BYTES:
        environment["SNAPSHOTD_ARGUMENTS"] = encoded.decode("utf-8")
    with _Signals() as signals:
        return _run(fields["call"], command, environment, connection, signals)


def _run(
    call: str, command: List[str], environment: Dict[str, str], connection: Optional[Link], signals: "_Signals"
) -> int:
    end: Dict[str, Any] = {"call": call}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    except OSError as exc:
        code = _NOT_FOUND if isinstance(exc, FileNotFoundError) else _NOT_RUNNABLE
        end.update(status="failed", error="{}: {}".format(type(exc).__name__, clean(str(exc))), exit_code=code)
        session.request("call_end", end, park=True, connection=connection)
        warn(clean(str(exc)))
        return code
    signals.forward_to(process)
    kept = _Streams(call, connection).pump(process)
    result = subprocess.CompletedProcess(command, process.returncode, kept["stdout"], kept["stderr"])
    end.update(status="done", exit_code=status_of(process.returncode))
    session.request("call_end", end, put(end, "result", plain(result)), park=True, connection=connection)
    return status_of(process.returncode)


def status_of(code: int) -> int:
    """An exit status as a shell counts it: 128+N for signal N."""
    return code if code >= 0 else 128 - code


def _again(replayed: Replayed) -> int:
    """Repeat the recorded command's output and exit status."""
    result = replayed.result if isinstance(replayed.result, dict) else {}
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        exact = result.get("base64", {}).get(name)
        text = result.get(name) or ""
        stream.buffer.write(base64.b64decode(exact) if exact is not None else text.encode("utf-8"))
        stream.flush()
    if replayed.error:
        sys.stderr.write("snapshotd: {}\n".format(replayed.error))
    if replayed.exit_code is not None:
        return replayed.exit_code
    return 0 if replayed.status == "done" else 1


class _Signals:
    """Inside the block SIGTERM and SIGHUP go to the command, also those that come before it runs; SIGINT is ignored,
    since a terminal sends it to the command as well."""

    def __init__(self) -> None:
        self._process: "Optional[subprocess.Popen[bytes]]" = None
        self._early: List[int] = []
        self._before: Dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._got)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, process: "subprocess.Popen[bytes]") -> None:
        """The command runs."""
        self._process = process
        for number in self._early:
            process.send_signal(number)

    def _got(self, number: int, frame: object) -> None:
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)


class _Streams:
    """A running command's two outputs."""

    def __init__(self, call: str, connection: Optional[Link]) -> None:
        self._call = call
        self._connection = connection
        self._kept: Dict[str, List[bytes]] = {"stdout": [], "stderr": []}
        self._sizes = {"stdout": 0, "stderr": 0}

    def pump(self, process: "subprocess.Popen[bytes]") -> Dict[str, bytes]:
        """Pass all output on until the command and both streams have ended, or no output comes any more: a process that
        the command left in the background may keep them open. Returns the kept part of each stream."""
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, name)
            while selector.get_map():
                ended = process.poll() is not None
                ready = selector.select(_POLL_S)
                if ended and not ready:
                    break
                for key, _ in ready:
                    data = os.read(key.fd, _PIECE_BYTES)
                    if data:
                        self._pass_on(key.data, data)
                    else:
                        selector.unregister(key.fileobj)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()
        return {name: b"".join(pieces) for name, pieces in self._kept.items()}

    def _pass_on(self, name: str, data: bytes) -> None:
        try:
            stream = sys.stdout if name == "stdout" else sys.stderr
            stream.buffer.write(data)
            stream.flush()
        except OSError:
            pass  # our reader has gone; the record has the output
        room = KEPT_BYTES - self._sizes[name]
        self._sizes[name] += len(data)
        if room > 0:
            self._kept[name].append(data[:room])
        piece = base64.b64encode(data).decode("ascii")
        session.request("output", {"call": self._call, "stream": name, "data_b64": piece}, connection=self._connection)
