"""A digest of a tool's code, by which the daemon tells whether two programs have the same tool (`snapshotd run --reuse`).

It covers the byte code of the function, its constants and defaults, what it wraps and what wraps it, and what its names
lead to within its own module: functions, classes, objects of these classes, plain values, and variables of the functions
around it. Things of other modules count by their name: those modules are part of the image or of the workspace. But what
was given to a decorator of another module counts: its arguments, and the function, unless that is an installed
library's. Comments and line numbers do not count.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import os
import re
import types
from typing import Any, Dict, Iterator, Optional, Set

MAX_VALUES = 20000
"""Values that are looked at; a tool that refers to more of them has no digest."""
_PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
_OF_STANDARD_LIBRARY = (
    "datetime",
    "decimal",
    "fractions",
    "ipaddress",
    "pathlib",
    "pathlib._local",
    "uuid",
    "zoneinfo",
)
"""Modules whose objects are values: their `repr` says all of them, and is no code of the program."""
_OF_CLASSES = ("__module__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__")


class _TooLargeError(Exception):
    """The tool refers to more than can be looked at."""


def digest(function: Any) -> Optional[str]:
    """32 hexadecimal characters, equal for equal code under one version of Python; None where it cannot be told."""
    try:
        inner = inspect.unwrap(function)
        walk = _Walk({getattr(one, "__module__", None) for one in (function, inner)})
        for piece in walk.of((function, _class_of(inner))):
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

    def __init__(self, modules: Set[Optional[str]]) -> None:
        self.hash = hashlib.sha256()
        self._modules = modules - {None, "builtins"}
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
        if issubclass(kind, (list, collections.deque)):
            yield from self.of(tuple(value))
        elif issubclass(kind, (dict, types.MappingProxyType)):
            yield from self.of(tuple(value.items()))
        elif issubclass(kind, set):
            yield from self.of(frozenset(value))
        elif issubclass(kind, (functools.partial, functools.partialmethod)):
            yield from self.of((self._adopt(value.func), value.args, value.keywords))
        elif issubclass(kind, property):
            yield from self.of((value.fget, value.fset, value.fdel))
        elif issubclass(kind, (staticmethod, classmethod)):
            yield from self.of(value.__func__)
        elif issubclass(kind, types.MethodType):
            yield from self.of((value.__func__, value.__self__))
        elif issubclass(kind, types.FunctionType):
            yield from self._function(value)
        elif issubclass(kind, type):
            yield from self._class(value)
        elif issubclass(kind, types.ModuleType):
            yield value.__name__
        else:
            yield from self._object(value, kind)
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if wrapped is not None:
            yield "wraps"
            yield from self.of(self._adopt(wrapped))

    def _is_own(self, value: Any) -> bool:
        """`__module__` of a wrapper is that of the function that it wraps; its global names tell its own."""
        names = getattr(value, "__globals__", None) if isinstance(value, types.FunctionType) else None
        return (value.__module__ if names is None else names.get("__name__")) in self._modules

    def _adopt(self, value: Any) -> Any:
        """Return a value that a decorator was given. The module of a function counts as the tool's own from now on, since that of
        the decorator may be a library's."""
        if isinstance(value, types.FunctionType) and not _is_installed(value.__globals__.get("__file__")):
            self._modules.add(value.__globals__.get("__name__"))
        return value

    def _function(self, function: types.FunctionType) -> Iterator[str]:
        yield "{}.{}".format(function.__module__, function.__qualname__)
        own = self._is_own(function)
        if own:
            yield from self.of((function.__code__, function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                inside = cell.cell_contents
            except ValueError:
                yield "empty"
            else:
                yield from self.of(self._adopt(inside))
        for name in sorted(_names(function.__code__)) if own else ():
            if name in function.__globals__:
                yield name
                yield from self.of(function.__globals__[name])

    def _object(self, value: Any, kind: type) -> Iterator[str]:
        """An object of the tool's module in full; of another one what is code in it, as a decorator's object has."""
        yield from self.of(kind)
        for base in (int, float, complex, str, bytes, bytearray, range, slice):
            if issubclass(kind, base):
                yield base.__repr__(value)
        if issubclass(kind, re.Pattern):
            yield from self.of((value.pattern, value.flags))
        elif kind.__module__ in _OF_STANDARD_LIBRARY:
            yield repr(value)
        own = self._is_own(kind) or issubclass(kind, types.SimpleNamespace)
        for name, inside in sorted(_state(value, kind).items()):
            if own or isinstance(inside, (types.FunctionType, types.MethodType, functools.partial)):
                yield name
                yield from self.of(self._adopt(inside))

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


def _is_installed(file: Optional[str]) -> bool:
    """True for a module of an installed library, or of Python itself."""
    path = os.path.abspath(file) if file else ""
    return path.startswith(_PYTHON) or not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep))


def _state(value: Any, kind: type) -> Dict[str, Any]:
    """The attributes of an object itself, read without any code of the program."""
    found: Dict[str, Any] = {}
    for base in kind.__mro__:
        for name, one in list(vars(base).items()):
            if isinstance(one, types.MemberDescriptorType) and name not in ("__dict__", "__weakref__"):
                try:
                    found[name] = one.__get__(value, kind)
                except AttributeError:
                    pass  # a slot that is not set
    try:
        found.update(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        pass
    return {name: one for name, one in found.items() if name != "__wrapped__"}


def _names(code: types.CodeType) -> Set[str]:
    """The names that a function and the functions in it look up."""
    found = set(code.co_names)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            found |= _names(part)
    return found
