"""Bodies that are read whole, within bounds of size and time."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request

from snapshotd.api.record import Json
from snapshotd.integrations.e2b.failures import WireError

BODY_S = 60.0


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body of a request. WireError: it is longer, or does not come within `BODY_S`."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > most_bytes:
                    raise WireError("too_large", f"a body of more than {most_bytes} bytes is too long")
    except TimeoutError as exc:
        raise WireError("deadline_exceeded", f"the body did not come within {BODY_S:.0f} s") from exc
    return bytes(data)


def json_object(data: bytes) -> Json:
    """The object that was sent; empty if nothing was. WireError: it is none."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError) as exc:
        raise WireError("invalid_argument", f"it is no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise WireError("invalid_argument", "it has to be a JSON object")
    return found
