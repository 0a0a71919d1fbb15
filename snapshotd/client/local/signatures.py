"""The types of the arguments of the client's methods, and of the fields of its requests. Both are checked before anything
is sent, by the very annotations: no method says twice what it takes."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from types import FunctionType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, BinaryIO, Literal, Union, Unpack, get_args, get_origin, get_type_hints

from snapshotd.api.record import UNSET, ApiRecord, Bounds, OneOf, Request, is_secret, types_of
from snapshotd.client.local.arguments import wrong

_TEXTS = str | bytes | bytearray | memoryview
_TOLD: dict[Any, str] = {
    str: "text",
    bytes: "bytes",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    NoneType: "None",
    Path: "a Path",
    Callable: "a function",
    Mapping: "a dictionary",
    dict: "a dictionary",
}
_FUNCTIONS: tuple[Any, ...] = (Callable,)
_PLAIN: dict[Any, Any] = {bytes: bytes | bytearray | memoryview, float: int | float, Path: os.PathLike, dict: Mapping}
"""The types that an argument may have in place of another."""


class Signature:
    """The arguments that a method takes besides its object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self._function = function

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """UsageError: an argument has another type than its annotation says. TypeError: a keyword is none of a method that takes the
        keywords of a TypedDict; Python itself tells of others, and of one that is missing."""
        types = _parameters(self._function)
        for name, value in self._given(args, kwargs):
            if name in types:
                check_type(name, value, types[name])
            elif any("Unpack[" in hint for hint in self._function.__annotations__.values()):
                raise TypeError(f"{self._function.__name__}() got an unexpected keyword argument {name!r}")

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        code = self._function.__code__
        names = code.co_varnames[1 : code.co_argcount]
        yield from zip(names, args, strict=False)
        for value in args[len(names) :] if code.co_flags & 0x04 else ():  # CO_VARARGS
            yield code.co_varnames[code.co_argcount + code.co_kwonlyargcount], value
        yield from kwargs.items()


class _Names(dict[str, Any]):
    """The names in a function's annotations. One that its module has for type checkers alone is any type."""

    def __init__(self, function: FunctionType) -> None:
        self._known = {**vars(builtins), **function.__globals__}

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):
            raise KeyError(name)
        return self._known.get(name, Any)


@cache
def _parameters(function: FunctionType) -> dict[str, Any]:
    given = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    types = get_type_hints(SimpleNamespace(__annotations__=given), localns=_Names(function))
    for name, hint in list(types.items()):
        if get_origin(hint) is Unpack:
            del types[name]
            types |= get_type_hints(get_args(hint)[0])
    return types


def check_request(request: Request) -> None:
    """UsageError: a field has another type than its annotation says, or is out of its bounds, or is text that UTF-8 does
    not have. The error names it."""
    for name, hint in types_of(type(request)).items():
        value = getattr(request, name)
        if value is not UNSET:
            check_type(name, value, hint, hidden=is_secret(type(request), name), sent=True)


def check_type(name: str, value: Any, hint: Any, *, hidden: bool = False, sent: bool = False) -> None:
    """UsageError unless the value is of that type. `hidden`: it is not shown. `sent`: texts become JSON as they are."""
    kinds = list(_members(hint))
    is_json = sent and isinstance(value, dict)  # a record that is JSON already
    kind = next((kind for kind in kinds if _is(value, kind) or (is_json and _is_record(kind))), None)
    if kind is None:
        taken = " or ".join(dict.fromkeys(map(_in_words, kinds)))
        hidden |= any(get_origin(one) in (Mapping, dict) or _is_record(one) for one in kinds)
        raise wrong(name, type(value) if hidden else value, taken)
    if get_origin(kind) is Annotated:
        for mark in kind.__metadata__:
            within = mark.excludes(value) if isinstance(mark, Bounds | OneOf) else None
            if within is not None:
                raise wrong(name, type(value) if hidden else value, within)
        check_type(name, value, kind.__origin__, hidden=hidden, sent=sent)
    elif isinstance(value, Request):
        check_request(value)
    elif isinstance(value, str) and sent:
        _check_text(name, value, hidden)
    else:
        _check_items(name, value, kind, hidden, sent)


def _check_text(name: str, value: str, hidden: bool) -> None:
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise wrong(name, type(value) if hidden else value, "text that UTF-8 has") from None


def _check_items(name: str, value: Any, kind: Any, hidden: bool, sent: bool) -> None:
    inner = get_args(kind)
    if isinstance(value, Mapping) and len(inner) == 2:
        for key, item in value.items():
            check_type(f"a name in {name}", key, inner[0], sent=sent)
            check_type(f"{name}[{key!r}]", item, inner[1], hidden=True, sent=sent)
    elif isinstance(value, list | tuple) and inner:
        each = inner if get_origin(kind) is tuple and ... not in inner else [inner[0]] * len(value)
        for number, (item, hint) in enumerate(zip(value, each, strict=True)):
            check_type(f"{name}[{number}]", item, hint, hidden=hidden, sent=sent)


def _members(hint: Any) -> Iterator[Any]:
    """The types of a union."""
    if get_origin(hint) in (Union, UnionType):
        for one in get_args(hint):
            yield from _members(one)
    else:
        yield hint


def _is(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Annotated:
        return any(_is(value, one) for one in _members(kind.__origin__))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin is tuple:
        return isinstance(value, list | tuple) and (... in get_args(kind) or len(value) == len(get_args(kind)))
    plain = origin or kind
    if plain in (Any, BinaryIO) or not isinstance(plain, type):
        return True  # or a variable
    if plain in _FUNCTIONS:
        return callable(value)
    if isinstance(value, bool) and plain in (int, float):
        return False
    if getattr(plain, "_is_protocol", False) and plain.__module__.startswith("snapshotd."):
        return all(hasattr(value, name) for name in vars(plain) if not name.startswith("_"))
    if issubclass(plain, Iterable) and not issubclass(plain, _TEXTS | Mapping):
        others = _TEXTS | Mapping | Set if plain is Sequence else _TEXTS | Mapping  # a set has no order
        return isinstance(value, Iterable) and not isinstance(value, others)
    return isinstance(value, _PLAIN.get(plain, plain))


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, ApiRecord)


def _in_words(kind: Any) -> str:
    """The values of a type, in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return " or ".join(map(_in_words, _members(kind.__origin__)))
    if origin is Literal:
        return " or ".join(get_args(kind))
    plain = origin or kind
    if plain in _TOLD:
        return _TOLD[plain]
    if getattr(plain, "_is_protocol", False) and plain.__module__.startswith("snapshotd."):
        return f"a file with a method {next(name for name in vars(plain) if not name.startswith('_'))}"
    if isinstance(plain, type) and issubclass(plain, Iterable):
        return "a list of texts" if get_args(kind)[:1] == (str,) else "a list"
    return f"a {plain.__name__}"
