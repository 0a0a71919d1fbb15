"""The conversation, and snapshots that no tool call asks for."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from snapshotd.agent.connection import INLINE_LIMIT_BYTES
from snapshotd.agent.session import session
from snapshotd.agent.values import clean, encode, plain

_PAGES_LIMIT = 1000000


def message(role: str, content: Any) -> None:
    """Append one message to the conversation. It belongs to the next snapshot and all later ones.

    `role`: 1 to 64 printable characters (`system`, `user`, `assistant`, `tool`, ...). `content`: any JSON value of up to 8 MiB; what is
    not JSON becomes its `repr`. Raises SnapshotdError or SnapshotdUnavailable.
    """
    value = plain(content)
    if not session.inside():
        session.outside_messages.append({"role": role, "content": value})
        return
    encoded = encode(value)
    if len(encoded) > INLINE_LIMIT_BYTES:
        session.request("message", {"role": clean(role)}, encoded)
    else:
        session.request("message", {"role": clean(role), "content": value})


def messages() -> List[Dict[str, Any]]:
    """The conversation so far, oldest first, as `{"role": ..., "content": ...}`; in a fork it begins with the inherited part.

    Outside of a sandbox: what this process appended.
    """
    if not session.inside():
        return [dict(entry) for entry in session.outside_messages]
    found: List[Dict[str, Any]] = []
    offset = 0
    for _ in range(_PAGES_LIMIT):
        answer = session.request("messages", {"offset": offset})
        page = answer["body"] if "body" in answer else answer["messages"]
        found.extend(page)
        if answer.get("next") is None:
            break
        offset = answer["next"]
    return found


def checkpoint(name: str) -> Optional[str]:
    """Take a snapshot now, without a tool call. Returns its id, or None outside of a sandbox.

    `name`: 1 to 200 printable characters. The process is parked meanwhile, as at the end of a tool call.
    """
    if not session.inside():
        return None
    answer = session.request("checkpoint", {"name": clean(name)}, park=True)
    return str(answer["snapshot"])
