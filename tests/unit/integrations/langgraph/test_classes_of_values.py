"""Values of many classes: a saver gives back what LangGraph's own savers give back, or refuses to store what it could not
give back."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import uuid
import zoneinfo
from typing import Any, NamedTuple, TypedDict

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, Interrupt, Send
from pydantic import BaseModel, SecretStr

from snapshotd.errors import UsageError
from snapshotd.integrations.langgraph import SnapshotdSaver
from tests.langgraph_rig import checkpoint, config, sqlite_saver

pytestmark = pytest.mark.filterwarnings("ignore")


class Status(str, enum.Enum):  # noqa: UP042, programs write it so
    OPEN = "open"


class Mode(enum.StrEnum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


class Right(enum.IntFlag):
    READ = 1
    WRITE = 2


class Bit(enum.Flag):
    A = 1
    B = 2


class Ratio(float, enum.Enum):
    HALF = 0.5


class Blob(bytes, enum.Enum):
    X = b"x"


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Point(NamedTuple):
    x: int
    y: str


Old = collections.namedtuple("Old", "a b")


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Bag(dict[str, int]):
    pass


class Row(list[int]):
    pass


class Pair(tuple[int, int]):
    __slots__ = ()


class Typed(TypedDict):
    a: int


@dataclasses.dataclass
class Plain:
    steps: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int


class Model(BaseModel):
    name: str
    status: Status = Status.OPEN


class Outer:
    class Inner(str, enum.Enum):  # noqa: UP042
        A = "a"

    @dataclasses.dataclass
    class Part:
        a: int


@dataclasses.dataclass
class Counted:
    a: int
    b: int = dataclasses.field(init=False, default=2)


VALUES: dict[str, Any] = {
    "str enum": Status.OPEN,
    "StrEnum": Mode.FAST,
    "IntEnum": Level.HIGH,
    "IntFlag": Right.READ | Right.WRITE,
    "IntFlag of one": Right.READ,
    "Flag": Bit.A | Bit.B,
    "float enum": Ratio.HALF,
    "bytes enum": Blob.X,
    "Enum": Color.RED,
    "Enum of a tuple": Color.PAIR,
    "NamedTuple": Point(1, "a"),
    "NamedTuple of an enum": Point(Level.HIGH, Status.OPEN),
    "namedtuple": Old(1, [2]),
    "tuple of an enum": (Status.OPEN, 1),
    "tuple of a NamedTuple": (Point(1, "a"), "b"),
    "list of enums": [Status.OPEN, Mode.FAST, "text", Level.HIGH],
    "list of NamedTuples": [Point(1, "a"), Point(2, "b")],
    "long list of enums": [Status.OPEN, HumanMessage("a" * 200, id="1")] * 40,
    "dict of enums": {"a": Status.OPEN, "b": [Point(1, "a")]},
    "set of enums": {Status.OPEN},
    "frozenset": frozenset({1, 2}),
    "deque": collections.deque([Status.OPEN, 1]),
    "str of a class": Text("text"),
    "int of a class": Number(3),
    "dict of a class": Bag(a=1),
    "list of a class": Row([1, 2]),
    "tuple of a class": Pair((1, 2)),
    "OrderedDict": collections.OrderedDict(a=1),
    "defaultdict": collections.defaultdict(int, a=1),
    "Counter": collections.Counter("aab"),
    "TypedDict": Typed(a=1),
    "dataclass": Plain(["a"]),
    "frozen dataclass": Frozen(1),
    "dataclass with a field of its own": Counted(1),
    "pydantic model": Model(name="a"),
    "list of pydantic models": [Model(name="a"), {"b": 1}],
    "SecretStr": SecretStr("s"),
    "message": AIMessage("a", id="1"),
    "Document": Document("text"),
    "Send": Send("node", {"a": Status.OPEN}),
    "Interrupt": Interrupt("why", id="1"),
    "Command": Command(resume=Status.OPEN),
    "UUID": uuid.UUID(int=7),
    "Decimal": decimal.Decimal("1.5"),
    "Fraction": fractions.Fraction(1, 3),
    "Path": pathlib.Path("/a/b"),
    "pattern": re.compile("a+", re.IGNORECASE),
    "datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(1, 2, 3),
    "timedelta": datetime.timedelta(1, 2, 3),
    "ZoneInfo": zoneinfo.ZoneInfo("UTC"),
    "address": ipaddress.ip_address("::1"),
    "bytes": b"bytes",
    "bytearray": bytearray(b"bytes"),
    "complex": 1j,
    "exception": ValueError("no"),
    "function": len,
    "class": Status,
    "None": None,
    "enum within a class": Outer.Inner.A,
    "dataclass within a class": Outer.Part(1),
    "list of those": [Outer.Inner.A, Outer.Part(1)],
}


UNREADABLE = {
    "bytes enum",
    "Enum of a tuple",
    "dataclass with a field of its own",
    "enum within a class",
    "dataclass within a class",
    "list of those",
}
"""Other savers give back bytes, a list, dictionaries and a text for them."""


def _kept(saver: Any, value: Any) -> Any:
    """What is read of a value in a channel, and of one that a task wrote; or the class of the error with which it was
    not stored."""
    try:
        at = saver.put(config("t"), checkpoint({"c": value}), {}, {"c": 1})
        saver.put_writes(at, [("c", value)], "task")
    except (TypeError, UsageError) as exc:
        return type(exc)
    found = saver.get_tuple(config("t"))
    return found.checkpoint["channel_values"]["c"], found.pending_writes[0][2]


def _shape(value: Any) -> Any:
    """The value with the classes of everything in it."""
    if isinstance(value, dict):
        return type(value), [(_shape(key), _shape(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [_shape(item) for item in value]
    return type(value), repr(value)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_from_other_savers(name: str, tmp_path: pathlib.Path) -> None:
    value = VALUES[name]
    with sqlite_saver(tmp_path / "other.db") as sqlite, SnapshotdSaver(tmp_path / "own.db") as saver:
        others, own = [_kept(InMemorySaver(), value), _kept(sqlite, value)], _kept(saver, value)
    if (
        own is UsageError
    ):  # its class is not where its name says: others give back its bare content, as a dict or a text
        assert name in UNREADABLE
    else:
        assert name not in UNREADABLE
        assert _shape(own) in map(_shape, others)


def test_another_member_of_a_readable_enum_may_be_unreadable(tmp_path: pathlib.Path) -> None:
    with SnapshotdSaver(tmp_path / "own.db") as saver:
        assert _kept(saver, Color.RED) == (Color.RED, Color.RED)
        assert _kept(saver, Color.PAIR) is UsageError
