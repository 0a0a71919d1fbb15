"""The wishes of a client, read from the body of its request. WireError: it is of the wrong form, or is not done here."""

from __future__ import annotations

import math
import re

from starlette.requests import Request

from snapshotd.api.record import Json
from snapshotd.api.wire import TIMEOUT_MAX_S
from snapshotd.integrations.e2b.bodies import json_object, read_body
from snapshotd.integrations.e2b.failures import WireError, unsupported

BODY_MAX_BYTES = 1 << 20
TIMEOUT_S = 300
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


async def body(request: Request) -> Json:
    """The JSON object that was sent; empty if nothing was."""
    return json_object(await read_body(request, BODY_MAX_BYTES))


def number(given: Json, name: str, default: float | None = None, *, least: float = 0) -> float:
    """A number of the body. Without a default it has to be there."""
    found = given.get(name)
    if found is None and default is not None:
        return default
    if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found < math.inf:
        raise WireError("invalid_argument", f"`{name}` has to be a number from {least:g} on")
    return found


def seconds(given: Json, name: str = "timeout", default: float | None = TIMEOUT_S) -> float:
    return min(number(given, name, default), TIMEOUT_MAX_S)


def texts(given: Json, name: str) -> dict[str, str]:
    """A field of the body that is an object of texts; empty if it is not there."""
    found = given.get(name) or {}
    if not isinstance(found, dict) or not all(isinstance(one, str) and "\0" not in one for one in found.values()):
        raise WireError("invalid_argument", f"`{name}` has to be an object of texts")
    return found


def variables(given: Json, name: str) -> dict[str, str]:
    """Variables of an environment: with another name no command of the sandbox could start."""
    found = texts(given, name)
    for key in found:
        if not key or "=" in key or not key.isprintable():
            raise WireError(
                "invalid_argument", f"{key[:40]!r} of `{name}` cannot be the name of a variable; leave it out"
            )
    return found


def maybe_text(given: Json, name: str) -> str | None:
    found = given.get(name)
    if found is not None and (not isinstance(found, str) or "\0" in found):
        raise WireError("invalid_argument", f"`{name}` has to be a text")
    return found or None


def name_and_tag(given: str | None) -> tuple[str, str | None]:
    """The parts of NAME or NAME:TAG."""
    name, colon, tag = (given or "").partition(":")
    if not _NAME.fullmatch(name) or (colon and not _TAG.fullmatch(tag)):
        raise WireError(
            "invalid_argument",
            f"{given!r} is no name; use letters, digits, '.', '_', '-' and '/', and a tag behind ':'",
        )
    return name, tag or None


def tags(given: Json) -> list[str]:
    found = given.get("tags") or []
    if not isinstance(found, list) or not all(isinstance(one, str) and _TAG.fullmatch(one) for one in found):
        raise WireError("invalid_argument", "`tags` has to be a list of tags: letters, digits, '.', '_' and '-'")
    return found


def refuse_memory(given: Json) -> None:
    """Unimplemented: the client asks for a snapshot with the memory of programs."""
    if given.get("memory") is True:
        raise unsupported(
            "snapshots of memory",
            "its snapshots have the files: leave the mode out, or say `filesystem`; programs start anew",
        )


def refuse_extras(given: Json) -> None:
    """Unimplemented: the client asks for a sandbox with something that this server does not have."""
    for name, what in (("mcp", "MCP gateway"), ("iam", "workload identities"), ("volumeMounts", "volumes")):
        if given.get(name):
            raise unsupported(what, f"leave `{name}` out")
