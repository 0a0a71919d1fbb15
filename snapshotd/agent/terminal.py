"""Asking the person at the terminal: how approvals work outside of a sandbox."""

from __future__ import annotations

import getpass
import sys
from typing import Any, Dict

from snapshotd.agent.wire.values import clean, encode, plain

_DETAILS_CHARS = 2000


def ask(question: str, details: Any = None) -> Dict[str, Any]:
    """The decision, as the daemon would answer: `approved`, `by`, `reason`, `answer`. Denied when there is no terminal,
    or at its end."""
    if not (_is_terminal(sys.stdin) and _is_terminal(sys.stderr)):
        return {"approved": False, "reason": "outside of a sandbox somebody has to be at the terminal"}
    if details:
        sys.stderr.write(encode(plain(details)).decode("utf-8")[:_DETAILS_CHARS] + "\n")
    sys.stderr.write("{} [y/N] ".format(clean(question)))
    sys.stderr.flush()
    answer = sys.stdin.readline().strip()
    if answer.lower() in ("y", "yes"):
        return {"approved": True, "by": _user(), "answer": answer}
    return {"approved": False, "by": _user(), "reason": answer or "no answer"}


def _is_terminal(stream: Any) -> bool:
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:
        return False  # closed


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "unknown"  # a user id without a name
