"""What every store must do. Each function of `CHECKS` takes an empty store of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.store.base import Store
from tests import long
from tests.contracts.refusal import refuses

BAD_KEYS = (
    "",
    "/",
    "a/",
    "/a",
    "a//b",
    ".",
    "..",
    "../key",
    "a/../b",
    "a/./b",
    "A",
    "a b",
    "a\0b",
    "a\n",
    "é",
    "a\\b",
    "@tmp/x",
    "a~",
    "x" * 201,
)
GOOD_KEYS = (
    "a",
    "0",
    "...",
    "..a",
    ".hidden",
    "-",
    "_",
    "packs/ab/cdef.pack",
    "a-b_c.d/e",
    "x" * 200,
    "/".join("y" * 100),
)
ORDERED = ("a", "a-b/c", "a.b", "a0", "b/-", "b/a", "b/a-", "b/a.z/x", "b/aa", "b-/c", "b.c", "b0", "c")
"""Names for which the order of folders and the order of whole keys differ: `-` and `.` come before the slash, digits
after."""


def values_round_trip(store: Store) -> None:
    rng = random.Random(1)
    for number, size in enumerate((0, 1, 4096, 65537, 5_000_001)):
        value = rng.randbytes(size)
        store.put(f"some/value-{number}", [value])
        assert store.get(f"some/value-{number}") == value
        assert store.size_bytes(f"some/value-{number}") == size


def parts_are_joined(store: Store) -> None:
    rng = random.Random(2)
    parts: list[bytes | bytearray | memoryview] = [rng.randbytes(rng.choice((0, 1, 17, 300))) for _ in range(5000)]
    parts += [bytearray(b"array"), memoryview(b"a view of it")[2:6], b"", memoryview(b"x" * 100_000)]
    store.put("joined", parts)
    assert store.get("joined") == b"".join(parts)
    store.put("none", [])
    store.put("empty", [b"", memoryview(b"")])
    assert store.get("none") == store.get("empty") == b""
    assert store.size_bytes("none") == 0


def ranges_are_exact(store: Store) -> None:
    value = random.Random(3).randbytes(10_000)
    store.put("a/value", [value])
    for offset in (0, 1, 5000, 9999, 10_000, 10_001, 1 << 40):
        for length in (None, 0, 1, 4999, 10_000, 1 << 40):
            expected = value[offset:] if length is None else value[offset : offset + length]
            assert store.get("a/value", offset, length) == expected, (offset, length)
    store.put("empty", [])
    assert store.get("empty", 0, 10) == store.get("empty", 5, 10) == store.get("empty", 5) == b""
    refuses(UsageError, store.get, "a/value", -1)
    refuses(UsageError, store.get, "a/value", 0, -1)


def what_is_not_there_is_not_found(store: Store) -> None:
    store.put("folder/value", [b"x"])
    for key in ("nothing", "folder", "folder/value/deeper", "folder/other", "fold", "else/where"):
        refuses(NotFound, store.get, key, says=(key,))
        refuses(NotFound, store.get, key, 3, 0)
        refuses(NotFound, store.get, key, 3, 5)
        refuses(NotFound, store.size_bytes, key)
        store.delete(key)
    assert list(store.keys()) == ["folder/value"]


def keys_are_checked(store: Store) -> None:
    for key in BAD_KEYS:
        refuses(UsageError, store.put, key, [b"x"])
        refuses(UsageError, store.get, key)
        refuses(UsageError, store.size_bytes, key)
        refuses(UsageError, store.delete, key)
    assert list(store.keys()) == []
    for key in GOOD_KEYS:
        store.put(key, [key.encode()])
    assert list(store.keys()) == sorted(GOOD_KEYS)
    assert all(store.get(key) == key.encode() for key in GOOD_KEYS)


def a_value_never_changes(store: Store) -> None:
    store.put("a/b", [b"first"])
    for other in (b"", b"firsT", b"first ", b"firs", b"x" * 100_000):
        refuses(Conflict, store.put, "a/b", [other], says=("a/b",))
        assert store.get("a/b") == b"first"
    assert list(store.keys()) == ["a/b"]


def putting_the_same_again_is_success(store: Store) -> None:
    value = random.Random(4).randbytes(3_000_000)
    for parts in ([value], [value[:7], b"", value[7:]], [value[:2_000_000], value[2_000_000:]]):
        store.put("a", parts)
    store.put("empty", [])
    store.put("empty", [b""])
    assert store.get("a") == value


def deleted_values_are_gone_and_can_come_back(store: Store) -> None:
    store.put("a/b/c", [b"one"])
    store.put("a/b/d", [b"two"])
    store.delete("a/b/c")
    store.delete("a/b/c")
    refuses(NotFound, store.get, "a/b/c")
    assert list(store.keys()) == ["a/b/d"]
    store.put("a/b/c", [b"other"])
    assert store.get("a/b/c") == b"other"
    assert store.get("a/b/d") == b"two"


def keys_are_listed_in_order(store: Store) -> None:
    assert list(store.keys()) == list(store.keys("a/b")) == []
    names = list(ORDERED)
    random.Random(5).shuffle(names)
    for key in names:
        store.put(key.replace("a", "a" * 3), [b"x"])
    expected = sorted(key.replace("a", "a" * 3) for key in ORDERED)
    assert list(store.keys()) == expected
    for prefix in (
        "",
        "a",
        "aaa",
        "aaaa",
        "aaa-b/",
        "b",
        "b/",
        "b/a",
        "b/aaa.z/x",
        "b/aaa.z/xy",
        "c/",
        "/",
        "..",
        "b/../b",
        "\0",
        "B",
    ):
        assert list(store.keys(prefix)) == [key for key in expected if key.startswith(prefix)], prefix


def many_keys_are_all_listed(store: Store) -> None:
    """More than a page of any service whose page the test has made small."""
    expected = sorted(f"{number % 3}/{number:05}" for number in range(100))
    for key in expected:
        store.put(key, [key.encode()])
    assert list(store.keys()) == expected
    assert list(store.keys("1/")) == [key for key in expected if key.startswith("1/")]
    listed = store.keys("0/")
    first = next(listed)
    store.delete("0/00099")
    assert first == "0/00000"
    assert {*listed} | {"0/00099", first} == {key for key in expected if key.startswith("0/")}


def threads_put_the_same_and_different_values(store: Store) -> None:
    """Six threads race for the same keys: exactly one value wins each, and everybody else is told."""
    rounds = long.size(6, 12)
    failures: list[BaseException] = []
    won: list[str] = []
    start = threading.Barrier(6)

    def work(number: int) -> None:
        try:
            for n in range(rounds):
                start.wait(60)
                store.put(f"same/{n}", [b"%d" % n * 50_000])
                store.put(f"own/{number}/{n}", [b"%d %d" % (number, n)])
                try:
                    store.put(f"contested/{n}", [b"%d" % number * 20_000])
                    won.append(f"{n} {number}")
                except Conflict:
                    continue
        except BaseException as exc:
            failures.append(exc)
            start.abort()
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures
    assert len(won) == len({one.split()[0] for one in won}) == rounds
    for n, number in (one.split() for one in won):
        assert store.get(f"contested/{n}") == number.encode() * 20_000
    assert len(list(store.keys())) == rounds + rounds + 6 * rounds


CHECKS: tuple[Callable[[Store], None], ...] = (
    values_round_trip,
    parts_are_joined,
    ranges_are_exact,
    what_is_not_there_is_not_found,
    keys_are_checked,
    a_value_never_changes,
    putting_the_same_again_is_success,
    deleted_values_are_gone_and_can_come_back,
    keys_are_listed_in_order,
    many_keys_are_all_listed,
    threads_put_the_same_and_different_values,
)
