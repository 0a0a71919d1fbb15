"""Records of the client, which become dataclasses when they are first used."""

from __future__ import annotations

import copy
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


def _told() -> type[Any]:
    """A record that nobody has used."""

    @records.record(frozen=True)
    class Told(records.ApiRecord):
        first: int
        path: records.SandboxPath
        token: str = records.field(repr=False)
        pairs: tuple[int, ...] = ()

    return Told


def _by_position(made: Any) -> Any:
    kind: Any = type(made)
    match made:
        case kind(first, path):
            return first, path


_JSON = {"pairs": [1], "token": "hush", "path": "a\ufffd", "path_b64": "Yf8=", "first": 1, "unknown": 2}


@pytest.mark.parametrize(
    "look",
    [
        lambda made, other: made == other,
        lambda made, other: hash(made) == hash(other),
        lambda made, other: repr(made) == repr(other) == made.__repr__() and "hush" not in repr(made),
        lambda made, other: dataclasses.replace(made, first=2) == dataclasses.replace(other, first=2) != made,
        lambda made, other: copy.deepcopy(made) == other,
        lambda made, other: list(vars(made)) == list(vars(other)),
        lambda made, other: {made: 1}[other] == 1,
        lambda made, other: _by_position(made) == _by_position(other) == (1, "/a\udcff"),
    ],
)
def test_a_record_that_was_only_read_is_no_dataclass_and_acts_as_one(look: Callable[[Any, Any], bool]) -> None:
    told = _told()
    made = told.of(_JSON)
    assert (made.first, made.path, made.pairs) == (1, "/a\udcff", (1,))
    assert "__init__" not in vars(told)
    other = _told().of(_JSON)
    assert made != other  # of another class
    assert look(told.of(_JSON), told(1, "/a\udcff", "hush", (1,)))
    fresh = _told()
    assert look(fresh.of(_JSON), fresh.of(_JSON))


def test_a_record_that_was_only_read_cannot_be_changed() -> None:
    for change in (lambda made: setattr(made, "first", 5), lambda made: delattr(made, "first")):
        made = _told().of(_JSON)
        with pytest.raises(dataclasses.FrozenInstanceError):
            change(made)
        assert made.first == 1


def test_what_is_left_out_has_its_default_or_is_missed() -> None:
    short = {name: value for name, value in _JSON.items() if name != "pairs"}
    assert _told().of(short).pairs == ()
    del short["token"]
    with pytest.raises(TypeError, match="token"):
        _told().of(short)


def test_a_class_of_a_user_may_have_a_record_as_its_base() -> None:
    class Mine(_told()):  # type: ignore[misc]
        own = 1

    mine = Mine.of(_JSON)
    assert (type(mine), mine.own, mine.first, mine) == (Mine, 1, 1, Mine.of(_JSON))


def test_a_record_with_a_base_compares_its_own_fields() -> None:
    @records.record(frozen=True)
    class Base(records.ApiRecord):
        first: int

    @records.record(frozen=True)
    class Full(Base):
        second: int

    assert Base.of({"first": 1}) == Base(1)
    assert Full.of({"first": 1, "second": 2}) != Full.of({"first": 1, "second": 3})
