"""What the shared values promise."""

from __future__ import annotations

import dataclasses
import inspect
import re
from enum import StrEnum

import pytest

from snapshotd import types
from snapshotd.types import ID_HEX_CHARS, NAME_PATTERN, SHORT_ID_CHARS, ImageID, LayerID, Stack, new_id, short

RECORDS = [cls for _, cls in inspect.getmembers(types, dataclasses.is_dataclass)]


def test_ids_are_random_lower_case_hexadecimal() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)
    assert ID_HEX_CHARS == 32


def test_the_short_form_is_a_prefix() -> None:
    full = new_id()
    assert full.startswith(short(full))
    assert len(short(full)) == SHORT_ID_CHARS
    assert short("abc") == "abc"


@pytest.mark.parametrize("name", ["a", "A.b-c_d", "0", "x" * 64])
def test_names_that_are_accepted(name: str) -> None:
    assert NAME_PATTERN.fullmatch(name)


@pytest.mark.parametrize("name", ["", ".", "..", "-n", "_x", "a/b", "a b", "a\n", "a\x1b[m", "é", "a:b", "x" * 65])
def test_names_that_could_be_something_else_are_refused(name: str) -> None:
    assert not NAME_PATTERN.fullmatch(name)


def test_a_new_layer_goes_on_top_of_a_new_stack() -> None:
    empty = Stack(ImageID("i"))
    one = empty.push(LayerID("a"))
    two = one.push(LayerID("b"))
    assert (empty.layers, one.layers, two.layers) == ((), ("a",), ("b", "a"))
    assert two.image == "i"


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_records_cannot_change(cls: type) -> None:
    assert RECORDS
    parameters = vars(cls)["__dataclass_params__"]
    assert parameters.frozen
    assert parameters.eq
    assert "__slots__" in vars(cls)


def test_enum_values_are_what_is_stored_and_sent() -> None:
    enums = [
        cls for _, cls in inspect.getmembers(types, inspect.isclass) if issubclass(cls, StrEnum) and cls is not StrEnum
    ]
    assert {cls.__name__: [member.value for member in cls] for cls in enums} == {
        "ApprovalStatus": ["pending", "approved", "denied", "expired", "stale"],
        "EntryKind": ["tool", "model", "question", "task", "checkpoint"],
        "SideEffect": ["local", "idempotent", "irreversible"],
        "CallStatus": ["done", "failed", "interrupted", "timed-out", "unknown"],
        "SnapshotState": ["captured", "stored", "lost", "pruned"],
        "Kind": ["file", "directory", "symlink", "fifo", "socket", "char-device", "block-device"],
        "TrajectoryStatus": ["running", "stopped", "finished", "failed", "interrupted"],
    }
