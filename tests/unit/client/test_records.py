"""Records of the client, which become dataclasses when they are first used."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from snapshotd.api import record as records


@records.record(frozen=True)
class Pair:
    first: int
    second: int = 2


def test_a_thread_that_comes_while_the_class_is_made_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Future[Pair] = Future()
    ordinary = dataclasses.dataclass

    def make() -> None:
        try:
            made.set_result(Pair(1))
        except TypeError as exc:
            made.set_exception(exc)

    other = threading.Thread(target=make)

    def slowly(**given: Any) -> Callable[[type], type]:
        def finish(cls: type) -> type:
            other.start()
            other.join(0.2)  # far too long for a thread that does not wait
            return ordinary(**given)(cls)

        return finish

    monkeypatch.setattr(dataclasses, "dataclass", slowly)
    assert Pair(3, 4) != Pair(3)
    assert made.result(60) == Pair(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.result().first = 5  # type: ignore[misc]
