"""Requests under a key: made once, also if they come at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.requests import Requests, present
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.types import RequestKey

KEY = RequestKey("key", "digest", 10**18)
Ids = tuple[str, ...]


@pytest.fixture
def catalog() -> Iterator[SqliteCatalog]:
    with closing(SqliteCatalog(":memory:")) as opened:
        yield opened


def once(
    requests: Requests, make: Callable[[], Ids], request: RequestKey | None = KEY, *, recall_only: bool = False
) -> Ids:
    with requests.asking(request) as asking:
        return asking.once(make, lambda made: ("recalled", *made), recall_only=recall_only)


def test_requests_at_the_same_time_make_one_thing(catalog: SqliteCatalog) -> None:
    requests, both = Requests(catalog), threading.Event()
    begun = list[RequestKey | None]()

    def make() -> Ids:
        begun.append(present())
        assert both.wait(60)
        catalog.requests.add(present(), ["made"])
        return ("made",)

    def second() -> Ids:
        with requests.asking(KEY) as asking:
            both.set()
            return asking.once(make, lambda made: ("recalled", *made))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once, requests, make)
        while not begun:
            assert not first.done()
        other = pool.submit(second)
        assert (first.result(), other.result()) == (("made",), ("recalled", "made"))
    assert begun == [KEY]
    assert present() is None


def test_a_request_that_failed_has_made_nothing(catalog: SqliteCatalog) -> None:
    requests = Requests(catalog)

    def fail() -> Ids:
        catalog.requests.add(present(), ["half"])
        raise UsageError("no")

    with pytest.raises(UsageError):
        once(requests, fail)
    with pytest.raises(NotFound, match="nothing is recorded"):
        once(requests, fail, recall_only=True)
    assert once(requests, lambda: ("made",)) == ("made",)


def test_a_key_is_one_requests_and_none_is_needed(catalog: SqliteCatalog) -> None:
    requests = Requests(catalog)

    def make() -> Ids:
        catalog.requests.add(present(), ["made"])
        return ("made",)

    assert once(requests, make) == ("made",)
    assert once(requests, make, recall_only=True) == ("recalled", "made")
    with pytest.raises(Conflict, match="'key' belongs to another request"):
        once(requests, make, replace(KEY, digest="other"))
    assert once(requests, make, None) == once(requests, make, None) == ("made",)


def test_a_client_that_asks_again_is_seen(catalog: SqliteCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(catalog)
    with requests.asking(KEY) as first, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.wait_for_repeat)
        with requests.asking(KEY) as second:
            assert waiting.result() is True
            monkeypatch.setattr("snapshotd.engine.requests._AGAIN_S", 0.01)
            assert second.wait_for_repeat() is False
    with requests.asking(KEY) as alone:
        assert alone.wait_for_repeat() is False, "the others have been answered"
