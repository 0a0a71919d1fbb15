"""The conversation, and snapshots that no tool call asks for."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from snapshotd.agent.calls import put, within
from snapshotd.agent.session import session
from snapshotd.agent.wire.values import clean, plain

_PAGES_LIMIT = 1000000


def message(role: str, content: Any) -> None:
    """Append one message to the conversation. It belongs to the next snapshot and all later ones.

    `role`: 1 to 64 printable characters (`system`, `user`, `assistant`, `tool`, ...). `content`: any JSON value of up
    to 8 MiB; other values become their `repr`. In a replay it is compared with the recorded one and not added again.
    Raises SnapshotdError or SnapshotdUnavailable.
    """
    value = plain(content)
    if not session.inside():
        session.outside_messages.append({"role": role, "content": value})
        return
    fields = dict(within(), role=clean(role))
    session.request("message", fields, put(fields, "content", value))


def messages() -> List[Dict[str, Any]]:
    """The conversation so far, oldest first, as `{"role": ..., "content": ...}`; in a fork it begins with the inherited
    part.

    Outside of a sandbox: the messages that this process appended.
    """
    if not session.inside():
        return [dict(entry) for entry in session.outside_messages]
    found: List[Dict[str, Any]] = []
    offset = 0
    for _ in range(_PAGES_LIMIT):
        answer = session.request("messages", {"offset": offset})
        found.extend(answer["body"])
        if answer.get("next") is None:
            break
        offset = answer["next"]
    return found


def checkpoint(name: str) -> Optional[str]:
    """Take a snapshot now, without a tool call. Returns its id, or None outside of a sandbox.

    `name`: 1 to 200 printable characters. The process is parked meanwhile, as at the end of a tool call. In a replay:
    the snapshot that was taken here.
    """
    if not session.inside():
        return None
    answer = session.request("checkpoint", dict(within(), call=os.urandom(16).hex(), name=clean(name)), park=True)
    return str(answer["snapshot"])
