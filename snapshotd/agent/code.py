"""A digest of a tool's code, by which the daemon tells whether two programs have the same tool (`snapshotd run --reuse`).

It covers the byte code of the function, its constants and defaults, and what its names lead to within its own module:
functions, classes, plain values, and variables of the functions around it. Things of other modules count by their name:
those modules are part of the image or of the workspace. Comments and line numbers do not count.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from typing import Any, Dict, Iterator, Optional, Set

MAX_VALUES = 20000
"""Values that are looked at; a tool that refers to more of them has no digest."""
_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
_OF_CLASSES = ("__module__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__")


class _TooLargeError(Exception):
    """The tool refers to more than can be looked at."""


def digest(function: Any) -> Optional[str]:
    """32 hexadecimal characters, equal for equal code under one version of Python; None where it cannot be told."""
    try:
        function = inspect.unwrap(function)
        walk = _Walk(getattr(function, "__module__", None))
        for piece in walk.of((function, _class_of(function))):
            walk.take(piece)
    except (_TooLargeError, RecursionError, ValueError):
        return None
    return walk.hash.hexdigest()[:32]


def _class_of(function: Any) -> Any:
    """The class that a method was defined in: the method may use all of it. None for other functions."""
    found = getattr(function, "__globals__", {})
    names = getattr(function, "__qualname__", "").split(".")[:-1]
    for place, name in enumerate(names):
        found = found.get(name) if place == 0 else getattr(found, name, None)
    return found if names and isinstance(found, type) else None


class _Walk:
    """One pass over what a function refers to."""

    def __init__(self, module: Optional[str]) -> None:
        self.hash = hashlib.sha256()
        self._module = module
        self._seen: Dict[int, Any] = {}
        self._left = MAX_VALUES

    def take(self, piece: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooLargeError
        self.hash.update(piece.encode("utf-8", "surrogatepass") + b"\0")

    def of(self, value: Any) -> Iterator[str]:
        """The value in pieces of text. Values that refer to each other are passed once. No code of the program runs:
        a value may stand for something that is not there yet."""
        kind = type(value)
        yield kind.__name__
        if kind in _PLAIN:
            yield repr(value)
        elif issubclass(kind, tuple):
            for item in value:
                yield from self.of(item)
        elif issubclass(kind, frozenset):
            yield repr(sorted(map(repr, value)))
        elif issubclass(kind, types.CodeType):
            yield from self._code(value)
        elif id(value) in self._seen:
            yield "again"
        else:
            self._seen[id(value)] = value  # it stays, so that no other value gets its id
            yield from self._once(value, kind)

    def _once(self, value: Any, kind: type) -> Iterator[str]:
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if issubclass(kind, list):
            yield from self.of(tuple(value))
        elif issubclass(kind, dict):
            yield from self.of(tuple(value.items()))
        elif issubclass(kind, set):
            yield from self.of(frozenset(value))
        elif issubclass(kind, functools.partial):
            yield from self.of((value.func, value.args, value.keywords))
        elif issubclass(kind, property):
            yield from self.of((value.fget, value.fset, value.fdel))
        elif issubclass(kind, (staticmethod, classmethod, types.MethodType)):
            yield from self.of(value.__func__)
        elif wrapped is not None:
            yield from self.of(wrapped)
        elif issubclass(kind, types.FunctionType):
            yield from self._function(value)
        elif issubclass(kind, type):
            yield from self._class(value)
        elif issubclass(kind, types.ModuleType):
            yield value.__name__
        else:
            yield from self.of(kind)

    def _is_own(self, value: Any) -> bool:
        return self._module is not None and value.__module__ == self._module

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield "{}.{}".format(function.__module__, function.__qualname__)
        if not self._is_own(function):
            return
        yield from self.of((function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:
                yield "empty"
            else:
                yield from self.of(inside)
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                yield name
                yield from self.of(function.__globals__[name])

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield code.co_code.hex()
        yield "{} {} {} {}".format(
            code.co_flags, code.co_argcount, code.co_kwonlyargcount, getattr(code, "co_posonlyargcount", 0)
        )
        yield from self.of((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts))

    def _class(self, value: type) -> Iterator[str]:
        yield "{}.{}".format(value.__module__, value.__qualname__)
        if self._is_own(value):
            yield from self.of(value.__bases__)
            for name in sorted(vars(value)):
                if name not in _OF_CLASSES:
                    yield name
                    yield from self.of(vars(value)[name])


def _names(code: types.CodeType) -> Set[str]:
    """The names that a function and the functions in it look up."""
    found = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found |= _names(part)
    return found
