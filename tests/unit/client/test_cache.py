"""A cache of bundles: found by key or beginning, never changed, never half there, and verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotd.client.bundles import cache as cache_module
from snapshotd.client.bundles.cache import BundleCache, CacheEntry, _name, open_cache
from snapshotd.errors import DataLoss, SnapshotdError, UsageError
from tests import s3_service

PART = 1000


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(cache_module, "PART_BYTES", PART)
    if request.param == "folder":
        yield str(tmp_path / "cache")
        return
    with s3_service.running() as endpoint:
        yield f"s3://{s3_service.make_bucket(endpoint)}/ci?endpoint={endpoint}"


def saved(cache: BundleCache, key: str, data: bytes) -> bool:
    def produce(write: Callable[[bytes], object]) -> bool:
        for start in range(0, len(data), 300):
            write(data[start : start + 300])
        return True

    return cache.save(key, produce) is not None


def content(entry: CacheEntry | None) -> bytes:
    assert entry is not None
    return b"".join(iter(lambda: entry.read(77), b""))


def test_an_entry_is_found_by_its_key_or_by_a_beginning(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 100))
    monkeypatch.setattr(cache_module.time, "time", lambda: float(next(clock)))
    with open_cache(place) as cache:
        assert cache.find("Linux-a") is None
        for key in ("Linux-c", "Linux-a", "Linux-b", "Lin", "other/key"):
            assert saved(cache, key, key.encode() * 700)
        assert cache.has("Linux-a")
        assert not cache.has("Linux-")
        found = {
            ("Linux-a", ()): ("Linux-a", True),
            ("Linux-", ()): ("Linux-b", False),  # the newest
            ("Linux-x", ("Mac-", "Linux-")): ("Linux-b", False),
            ("Linux-x", ("other", "Linux-")): ("other/key", False),
            ("Lin", ("other",)): ("Lin", True),
        }
        for (key, restore_keys), (expected, exact) in found.items():
            entry = cache.find(key, restore_keys)
            assert entry is not None
            assert (entry.key, entry.exact, entry.bytes) == (expected, exact, len(expected) * 700)
            assert content(entry) == expected.encode() * 700
        assert cache.find("linux-a", ("li",)) is None, "keys differ in case"


def test_an_entry_never_changes(place: str) -> None:
    with open_cache(place) as cache:
        assert saved(cache, "k", b"one" * 900)
        assert not saved(cache, "k", b"two" * 900)
        assert content(cache.find("k")) == b"one" * 900
        assert len(list(cache._store.keys("parts/"))) == 3, "the second one's parts are gone"


def test_of_two_that_save_one_key_at_a_time_one_does(place: str) -> None:
    inside, results = threading.Barrier(2, timeout=60), {}

    def save(value: bytes) -> None:
        def produce(write: Callable[[bytes], object]) -> bytes:
            write(value * 1500)
            inside.wait()
            return value

        with open_cache(place) as cache:
            results[value] = cache.save("k", produce)

    threads = [threading.Thread(target=save, args=(value,)) for value in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [value for value, made in results.items() if made is not None]
    with open_cache(place) as cache:
        assert content(cache.find("k")) == winner * 1500
        assert len(list(cache._store.keys("parts/"))) == 2


def test_what_fails_in_the_middle_leaves_nothing(place: str) -> None:
    def produce(write: Callable[[bytes], object]) -> None:
        write(b"x" * 2500)
        raise UsageError("no more")

    with open_cache(place) as cache:
        with pytest.raises(UsageError, match="no more"):
            cache.save("k", produce)
        assert list(cache._store.keys()) == []


def test_a_changed_byte_is_found_in_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PART_BYTES", PART)
    data = bytes(range(256)) * 10
    with open_cache(tmp_path / "cache") as cache:
        assert saved(cache, "k", data)
        files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert len(files) == 4
        for path in files:
            before = path.read_bytes()
            for at in range(0, len(before), 7):
                path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
                given = b""
                try:
                    entry = cache.find("k")
                    while entry is not None and (piece := entry.read(100)):
                        given += piece
                except DataLoss as exc:
                    assert "cache" in exc.message  # noqa: PT017 - most flips are found, some change the time alone
                    assert data.startswith(given)
                else:
                    assert given == data
                    assert path.parent.name == "entries", "only a flip of an entry's time changes nothing"
            path.write_bytes(before[:-1])
            with pytest.raises(DataLoss):
                content(cache.find("k"))
            path.write_bytes(before)
        for path in files:
            if path.parent.name != "entries":
                path.unlink()
                with pytest.raises(DataLoss, match="is missing"):
                    content(cache.find("k"))
                break


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12), st.data())
def test_names_keep_beginnings_and_are_told_apart(key: str, data: st.DataObject) -> None:
    name = _name(key)
    assert name.startswith(_name(key[: data.draw(st.integers(1, len(key)))]))
    other = data.draw(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12))
    assert (_name(other) == name) == (other == key)
    assert name.startswith(_name(other)) == key.encode().startswith(other.encode())


@pytest.mark.parametrize("key", ["", "k" * 181, "\ud800", "Ü" * 31])
def test_a_key_that_cannot_be_one_says_why(tmp_path: Path, key: str) -> None:
    with open_cache(tmp_path / "cache") as cache, pytest.raises(UsageError, match="of a cache"):
        cache.find(key)


@pytest.mark.parametrize("place", ["/dev/null", "s3://", "ftp://host/x"])
def test_a_place_that_cannot_be_a_cache_says_why(place: str) -> None:
    with pytest.raises(SnapshotdError, match=r"cache|store"), open_cache(place):
        pass
