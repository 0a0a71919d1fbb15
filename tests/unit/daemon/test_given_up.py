"""A request whose client has gone is given up, also while it copies many files."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from snapshotd.daemon.http.routes.shared import Named, Service, once_unless_abandoned
from snapshotd.engine.requests import Asking
from snapshotd.errors import Conflict
from snapshotd.kernel import turns


def test_a_long_copy_ends_when_its_client_has_gone() -> None:
    begun = threading.Event()

    def copy() -> str:
        begun.set()
        for _ in range(60_000):
            threading.Event().wait(0.001)
            turns.give_way()
        return "copied"

    async def receive() -> dict[str, str]:
        await anyio.to_thread.run_sync(begun.wait)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        request = SimpleNamespace(receive=receive)
        requests = SimpleNamespace(asking=lambda _: nullcontext(Asking()))
        service = SimpleNamespace(engine=SimpleNamespace(requests=requests))
        named = SimpleNamespace(request=lambda _: None, recall=False)
        await once_unless_abandoned(
            cast(Any, request), cast(Service, service), cast(Named, named), None, copy, lambda _: "", lambda _: None
        )

    with pytest.raises(Conflict, match="was given up"):
        anyio.run(ask)


def test_what_cleans_up_may_give_way() -> None:
    given_up = threading.Event()
    given_up.set()
    with turns.until(given_up):
        with pytest.raises(Conflict):
            turns.give_way()
        turns.give_way()
    turns.give_way()
