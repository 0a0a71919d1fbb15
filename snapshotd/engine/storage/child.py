"""A child process for work that would hold Python's interpreter lock, or that may die without taking the daemon along.

The daemon answers tool calls in a few milliseconds; one busy thread in its process would add the interpreter's switch
interval to every system call of a pivot. So such work is done in a child, at idle priority: one JSON request a line in,
answers a line each out, in order: any number of {"progress": "..."}, then one result or {"error": {"code", "message"}}.
A child dies with the daemon.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from snapshotd.errors import NO_ROOM, InternalError, OutOfSpace, ServiceAwayError, SnapshotdError, Unavailable, error_of
from snapshotd.kernel import memory, processes

_log = logging.getLogger(__name__)
Progress = Callable[[str], None]
Serve = Callable[[dict[str, Any], Progress], dict[str, Any]]
NICE = 10
"""Priority of a child's work; a caller that waits for it can raise it (`EngineChild.prioritise`)."""
REST_AFTER_S = 10.0
"""Idle time before a child process frees its unused memory (the archive process, after an image and a step of 78 MiB:
119 of 180 MiB)."""


class EngineChild:
    """The daemon's end. Starts the process at the first request, and again if it died. Thread-safe; requests are served
    one by one."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        """The result. Raises the child's error, by its type; InternalError when it died (the request may be
        repeated)."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            if self._closed:
                raise InternalError("the daemon is going down")
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            try:
                answer = _exchange(process, line, progress)
            except (
                BaseException
            ):  # raised by `progress`: the result still comes, and the next request would take it for its own
                self._end(process)
                raise
            if answer is None:
                self._end(process)
                raise InternalError(
                    f"the worker process ended while it was asked to {request['op']}; the daemon's log says why"
                )
        if "error" in answer:
            if "traceback" in answer:
                _log.error("worker process: %s\n%s", answer["error"]["message"], answer["traceback"])
            raise error_of(answer)
        return answer

    @property
    def pid(self) -> int | None:
        """The process that serves now, if there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def prioritise(self, nice: int) -> None:
        """Give the process another priority (0: as the daemon), with all its threads and children. Not an error when it
        is not running."""
        own = self.pid
        for pid in () if own is None else (own, *processes.descendants(own)):
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    os.setpriority(os.PRIO_PROCESS, int(task), nice)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ends, or one of its threads has; or an ordinary user's daemon may not raise it again

    def close(self) -> None:
        """End the process at once: its work may be cut off anywhere. Idempotent."""
        self._closed = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        end(process)
        self._process = None


def _exchange(process: subprocess.Popen[bytes], line: bytes, progress: Progress | None) -> dict[str, Any] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    while (answer := process.stdout.readline()).endswith(b"\n"):
        result: dict[str, Any] = json.loads(answer)
        if "progress" not in result:
            return result
        if progress is not None:
            progress(result["progress"])
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap a child and close its pipes."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                pass  # the unwritten rest has no reader any more
    process.kill()
    process.wait()


def _end_with_the_daemon() -> None:
    """Die as soon as the daemon is gone, also in the middle of a request. Not PR_SET_PDEATHSIG: that fires when the
    *thread* ends that started this process, and the first request may come from a passing one."""
    hung_up = select.poll()
    hung_up.register(sys.stdin.fileno(), 0)
    hung_up.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _requests() -> Iterator[bytes]:
    """Yield requests one by one. The daemon writes the next one after the last answer, so none waits unseen in the
    buffer."""
    source = sys.stdin.buffer
    while True:
        if not select.select([source], [], [], REST_AFTER_S)[0]:
            memory.give_back()
        line = source.readline()
        if not line:
            return
        yield line


def open_lazily(open_handler: Callable[[], Serve]) -> Serve:
    """A handler that is opened for the first request, and again for the next one if that fails: so the failure is an answer."""
    made: list[Serve] = []

    def handle(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        if not made:
            made.append(open_handler())
        return made[0](request, progress)

    return handle


def serve(handler: Serve) -> None:
    """The child's end: answer requests from standard input until it closes. Expected errors are answered, defects end
    the process."""
    threading.Thread(target=_end_with_the_daemon, name="daemon-watch", daemon=True).start()
    os.nice(NICE)

    def answer(value: dict[str, Any]) -> None:
        try:
            sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # the daemon is gone, so no answer is needed

    for line in _requests():
        try:
            answer(handler(json.loads(line), lambda text: answer({"progress": text})))
        except SnapshotdError as exc:
            answer(exc.as_json())
        except ServiceAwayError as exc:
            answer(Unavailable(str(exc)).as_json())
        except OSError as exc:
            kind = OutOfSpace if exc.errno in NO_ROOM else InternalError
            answer(kind(f"the worker process cannot go on: {exc}").as_json())
        except Exception as exc:  # noqa: BLE001 - the top of a request: the daemon's log shall say why this process ends
            defect = InternalError(
                f"a defect of snapshotd ({type(exc).__name__}) ended the worker process; the daemon's log has the traceback"
            )
            answer({**defect.as_json(), "traceback": traceback.format_exc()})
            sys.exit(defect.exit_code)
