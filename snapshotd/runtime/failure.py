"""Turns a runtime's message about a failed start into the project's errors. Pure; no driver is imported.

runc writes one line into its log, or, when the very last step fails, to the command's standard error. The reason always
stands at the end, so only ends are compared: the names before it belong to the caller and may hold any text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from snapshotd.errors import CommandNotFound, CommandNotRunnable, SandboxFailed, SnapshotdError

_MAX_REASON_CHARS = 500
_MAX_NAME_CHARS = 200
_CHDIR = re.compile(r'chdir to cwd \("')
_EXECVE = re.compile(r'(?:exec failed: )?(?:unable to start container process: )?exec [^ "]*/')
"""`exec /path: reason` is execve(2) itself failing on a program that was found; a failed look-up reads `exec: "name":
reason`."""
_TOO_LONG = "argument list too long"
"""E2BIG of execve(2): one string is longer than MAX_ARG_STRLEN (32 pages), or all of them take more than a quarter of
the stack's limit."""
_MISSING = ("no such file or directory", "not a directory", "file name too long")
_SERVER_GONE = ("software caused connection abort", "transport endpoint is not connected")
"""ECONNABORTED and ENOTCONN of a FUSE mount: the process that served it has died."""
_NOT_RUNNABLE = (
    "permission denied",
    "is a directory",
    "exec format error",
    "text file busy",
    "operation not permitted",
    "no such device or address",
    "too many levels of symbolic links",
    "input/output error",
    "invalid argument",
)


def log_reason(log: Path) -> str:
    """The last error in a runc log (one JSON object per line), or all of its text if there is none; "" without the file. At
    most 500 characters."""
    reason, text = "", log.read_text("utf-8", "replace") if log.exists() else ""
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            reason = reason or line
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "fatal"):
            reason = str(entry.get("msg", ""))
    return shorten(reason or text)


def shorten(text: str, limit: int = _MAX_REASON_CHARS) -> str:
    """One printable line of at most `limit` characters; the middle is left out, since the reason stands at the end."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) <= limit:
        return line
    return f"{line[: limit // 2 - 3]} ... {line[-(limit // 2 - 3) :]}"


def command_failure(reason: str, program: str, cwd: str) -> SnapshotdError:
    """The error for a command that did not start. `reason` is the runtime's text, `program` the command's first word.

    CommandNotFound: no such program or working directory. CommandNotRunnable: it is there, but cannot be run (no
    permission, a directory, another machine's format, an interpreter that is missing). Anything else is SandboxFailed.
    """
    text = reason.strip()
    program, cwd = shorten(program, _MAX_NAME_CHARS) or "''", shorten(cwd, _MAX_NAME_CHARS)
    if text.lower().endswith(_SERVER_GONE):
        return SandboxFailed(
            f"{program} could not be started in the sandbox: the process that serves its files has died; try again, another one serves them"
        )
    if _CHDIR.search(text):
        if text.endswith(("no such file or directory", "not a directory")):
            return CommandNotFound(
                f"the working directory {cwd} does not exist in the sandbox; create it or name another"
            )
        return CommandNotRunnable(
            f"the working directory {cwd} cannot be entered in the sandbox: {_tail(text)}; name another"
        )
    if text.endswith(("executable file not found in $PATH", "executable file not found in %PATH%")):
        return CommandNotFound(f"there is no program {program} on the sandbox's PATH; install it or give its full path")
    if text.endswith(_MISSING):
        if _EXECVE.match(text):
            return CommandNotRunnable(
                f"{program} cannot be run in the sandbox: the interpreter it names does not exist; install it or correct the first line"
            )
        return CommandNotFound(f"there is no program {program} in the sandbox; install it or correct the path")
    if text.endswith(_TOO_LONG) and ("exec" in text):
        return CommandNotRunnable(
            f"{program} cannot be run in the sandbox: its arguments are too long for the kernel, which takes 128 KiB for one and about "
            "2 MiB for all with the environment; pass the rest in a file or on standard input"
        )
    if text.endswith(_NOT_RUNNABLE) and ("exec" in text):
        return CommandNotRunnable(f"{program} cannot be run in the sandbox: {_tail(text)}; check its mode and format")
    return SandboxFailed(
        f"{program} could not be started in the sandbox: {shorten(text) or 'the runtime gave no reason'}"
    )


def _tail(text: str) -> str:
    return shorten(text.rsplit(": ", 1)[-1])


def removal_may_work_again(status: int | None, text: str) -> bool:
    """True if an engine's refusal to remove a container has a passing reason.

    409: another removal is under way. "is not running": the container ended between the engine's look and its kill
    (seen on 20.10 with status 500, eight containers at once).
    """
    return status == 409 or "is not running" in text
