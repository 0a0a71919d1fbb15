"""Facts about a tool that are known before it is called: its name, its parameters, and its side effects as given to
`@tool`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from snapshotd.agent import code
from snapshotd.agent.replay import Replayed
from snapshotd.agent.wire.values import clean, label, restore

if TYPE_CHECKING:
    from snapshotd.agent.calls import Call

SIDE_EFFECTS = ("local", "idempotent", "irreversible")
_MISSING = object()
Key = Union[str, Callable[..., str]]
Compensation = Union[Sequence[str], Callable[[Dict[str, Any]], Any]]


class Spec:
    """A function and how its calls are recorded. Raises ValueError or TypeError for options that make no sense."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: Optional[str] = None,
        *,
        kind: str = "tool",
        side_effect: str = "local",
        approve: Union[bool, str] = False,
        compensate: Optional[Compensation] = None,
        key: Optional[Key] = None,
        reuse: bool = True,
    ) -> None:
        self.function = function
        self.kind = kind
        self.name = label(
            "A {}'s name".format(kind),
            name if name is not None else getattr(function, "__name__", type(function).__name__),
        )
        if side_effect not in SIDE_EFFECTS:
            raise ValueError(
                "The side effect of {} is {!r}; it can be {}.".format(self.name, side_effect, ", ".join(SIDE_EFFECTS))
            )
        if not isinstance(approve, (bool, str)) or (isinstance(approve, str) and not approve.strip()):
            raise TypeError("approve of {} is neither True nor a question.".format(self.name))
        if key is not None and not callable(key) and not isinstance(key, str):
            raise TypeError("The key of {} is neither a text nor a function.".format(self.name))
        self.side_effect = side_effect
        self.approve = clean(approve) if isinstance(approve, str) else approve
        if not isinstance(reuse, bool):
            raise TypeError("reuse of {} is neither True nor False.".format(self.name))
        self.key = key
        self._reuse = reuse
        self._code: Optional[str] = None
        self.compensate = None if compensate is None else compensation(self.name, compensate)
        self.signature: Optional[inspect.Signature] = None
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            pass  # some built-in functions have none; their arguments are recorded by position
        self.receiver = _receiver(function, self.signature)
        self.scope: Dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
        """The names of the module that the function comes from."""

    def bind(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[str, Any]:
        """Arguments by name, without a method's `self`. A call that does not fit the signature is recorded as it was
        made."""
        if self.signature is not None:
            try:
                named = dict(self.signature.bind(*args, **kwargs).arguments)
            except TypeError:
                pass  # the function itself will say so
            else:
                if self.receiver is not None:
                    named.pop(self.receiver, None)
                return named
        return {"args": list(args), "kwargs": kwargs}

    def apply_edit(
        self, args: Tuple[Any, ...], kwargs: Dict[str, Any], sent: Dict[str, Any], new: Any
    ) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """The arguments to run with, after the approver has changed the recorded ones from `sent` to `new`. A value
        that is equal in both stays the object it was. TypeError when they cannot be the arguments of this function."""
        if not isinstance(new, dict):
            raise TypeError("The arguments that the approver gave to {} are not an object.".format(self.name))
        before = self.bind(args, kwargs)
        after = {
            name: before[name] if name in before and sent.get(name, _MISSING) == value else value
            for name, value in new.items()
        }
        if self.signature is None or (set(before) == {"args", "kwargs"} and "args" not in self.signature.parameters):
            return tuple(after.get("args", ())), dict(after.get("kwargs", {}))
        bound = self.signature.bind(*args, **kwargs)
        unknown = sorted(set(after) - set(self.signature.parameters))
        if unknown:
            raise TypeError("{} has no parameter {!r}, which the approver gave it.".format(self.name, unknown[0]))
        receiver = {} if self.receiver is None else {self.receiver: bound.arguments[self.receiver]}
        merged = dict(receiver, **after)
        bound.arguments.clear()
        for name, parameter in self.signature.parameters.items():  # in their order, which `args` relies on
            if name in merged:
                bound.arguments[name] = (
                    tuple(merged[name]) if parameter.kind is parameter.VAR_POSITIONAL else merged[name]
                )
        return bound.args, bound.kwargs

    def key_of(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[str]:
        """The program's own idempotency key of a call: the result of `key` for its arguments, or `key` formatted with
        them."""
        if self.key is None:
            return None
        made = self.key(*args, **kwargs) if callable(self.key) else self.key.format(**self.bind(args, kwargs))
        return label("The idempotency key of {}".format(self.name), made)

    def reusable(self) -> Dict[str, Any]:
        """The fields that decide if another run's call of this tool may be answered from this one: its code, or that
        none may. The code is looked at once, at the first call."""
        if self._reuse and self._code is None:
            self._code = code.digest(self.function)
            self._reuse = self._code is not None
        return {"code": self._code} if self._reuse else {"reuse": False}

    # -- what a model call does otherwise (models.py) --

    def to_record(self, value: Any) -> Any:
        """The part of a result or a generator's item that is recorded."""
        return value

    def observe(self, call: "Call", value: Any) -> None:
        """Take note of a result or an item that the running call has produced."""

    def end(self, call: "Call", result: Any) -> Any:
        """Record the result of a function that has returned, and return the value for the program."""
        call.end(result)
        return result

    def outcome(self, replayed: Replayed) -> Any:
        """The program's outcome for a recorded call: returns its result, or raises its exception."""
        return replayed.outcome(self.scope)

    def item(self, recorded: Any) -> Any:
        """The program's value for a recorded item."""
        return restore(recorded)


def _receiver(function: Callable[..., Any], signature: Optional[inspect.Signature]) -> Optional[str]:
    """`self` or `cls` of a function defined in a class; its repr holds an address, which would differ in every run."""
    if signature is None or not signature.parameters:
        return None
    scope = getattr(function, "__qualname__", "").rpartition(".")[0]
    first = next(iter(signature.parameters))
    return first if scope and not scope.endswith("<locals>") and first in ("self", "cls") else None


def compensation(tool: str, given: Compensation) -> Dict[str, List[str]]:
    """`compensate` as it is recorded: the command that undoes a call. ValueError when a function could not be found by
    that command."""
    if not callable(given):
        argv = [given] if isinstance(given, str) else list(given)
        if isinstance(given, str) or not argv or not all(isinstance(part, str) and "\0" not in part for part in argv):
            raise ValueError(
                "compensate of {} is neither a function nor a list of texts: a command and its arguments.".format(tool)
            )
        return {"argv": [clean(part) for part in argv]}
    function = inspect.unwrap(given)
    if isinstance(function, functools.partial) or not inspect.isfunction(function):
        raise ValueError("compensate of {} is not a function of a module; define one with `def`.".format(tool))
    module = sys.modules.get(function.__module__)
    file = function.__code__.co_filename
    if getattr(module, function.__qualname__, None) is not given or not os.path.isfile(file):
        raise ValueError(
            "compensate of {} is {}, which another process cannot find in a file: define it at the top level of a module, "
            "before the tool, and under its own name.".format(tool, function.__qualname__)
        )
    return {
        "argv": [
            sys.executable or "python3",
            "-m",
            "snapshotd.agent.compensate",
            os.path.abspath(file),
            function.__qualname__,
        ]
    }
