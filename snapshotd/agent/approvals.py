"""`approve`: ask a person and wait for the answer, however long that takes."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

from snapshotd.agent import terminal
from snapshotd.agent.calls import within
from snapshotd.agent.session import session
from snapshotd.agent.wire.values import ARGUMENT_LIMIT_BYTES, arguments, bound, clean


class Approval:
    """A person's decision; true if they agreed. `by`: the person; `reason`: their reason to refuse; `answer`: anything
    else that they said. Each None if not given."""

    __slots__ = ("answer", "approved", "by", "reason")

    def __init__(self, decision: Dict[str, Any]) -> None:
        self.approved = decision.get("approved") is True
        self.by: Optional[str] = decision.get("by")
        self.reason: Optional[str] = decision.get("reason")
        self.answer: Any = decision.get("answer")

    def __bool__(self) -> bool:
        return self.approved

    def __repr__(self) -> str:
        return "<Approval approved={} by={!r} reason={!r}>".format(self.approved, self.by, self.reason)


def approve(question: str, details: Any = None, expires_s: Optional[float] = None) -> Approval:
    """Ask a person, and return their decision. It survives restarts of everything; in a replay it is the recorded one.

    `details`: a JSON value that the person sees, up to 64 KiB. `expires_s`: seconds after which it counts as denied.
    Other threads go on meanwhile; in a coroutine, await it in a thread (`asyncio.to_thread`), or its event loop stands
    still. Outside of a sandbox the terminal is asked; without one it is denied. Raises SnapshotdError or
    SnapshotdUnavailable.
    """
    if not session.inside():
        return Approval(terminal.ask(question, details))
    fields: Dict[str, Any] = dict(
        within(), call=os.urandom(16).hex(), question=bound(clean(question), ARGUMENT_LIMIT_BYTES)
    )
    if details is not None:
        fields["details"] = arguments({"details": details})["details"]
    if expires_s is not None:
        fields["expires_s"] = expires_s
    waiting = session.wait("approve", fields)
    try:
        return Approval(waiting.answer())
    finally:
        session.release(waiting.connection)
