"""Records as outcomes: the return value or exception of a recorded call, for a program that is started again.

A replayed call returns the JSON value that was recorded, so a tuple comes back as a list; a result of `subprocess.run`
comes back as one. It raises an exception of the recorded type if the program has one: a built-in exception, one that
the tool's module knows by that name, or the only loaded one of that name. An exception class whose constructor wants
more than a message is made without it, so that `except` clauses and `str` work and other attributes are missing.
Otherwise ReplayedError is raised.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from typing import Any, Dict, Iterator, Optional, Type

from snapshotd.agent.wire.values import restore, restore_outputs

_CLASS_LIMIT = 20000
_OS_ERROR = re.compile(r"\[Errno (\d+)\] (.*?)(?:: (.*?))?(?: -> (.*))?\Z", re.DOTALL)
_COMMAND = re.compile(
    r"Command (.*) (?:returned non-zero exit status|died with|timed out after) .*?([\d.]*)(?: seconds)?\.?\Z", re.DOTALL
)


class ReplayedError(Exception):
    """A recorded call failed with an exception that this program does not know. `type_name` is the name of its type."""

    def __init__(self, message: str, type_name: str = "Exception") -> None:
        super().__init__(message)
        self.type_name = type_name


class Replayed:
    """The recorded outcome of a call."""

    __slots__ = ("error", "exit_code", "result", "status")

    def __init__(self, answer: Dict[str, Any]) -> None:
        record = answer["replayed"]
        self.status = record.get("status")
        self.error: Optional[str] = record.get("error")
        self.exit_code: Optional[int] = record.get("exit_code")
        self.result: Any = answer["body"] if "body" in answer else record.get("result")

    def outcome(self, scope: Dict[str, Any]) -> Any:
        """The result, or the exception raised. `scope`: the names of the module that the function comes from."""
        if self.status != "done":
            raise self.exception(scope)
        return restore(self.result)

    def exception(self, scope: Dict[str, Any]) -> BaseException:
        """The exception, as like the recorded one as it can be had."""
        text = self.error or "ReplayedError: the recorded outcome of this call is {}".format(self.status)
        name, _, message = text.partition(": ")
        if name == "CalledProcessError" or name == "TimeoutExpired":
            made = self._make_command_exception(name, message)
            if made is not None:
                return made
        kind = _find_class(name, scope)
        if kind is None:
            known = name.isidentifier()
            return ReplayedError(message if known else text, name if known else "Exception")
        return _make_exception(kind, message)

    def _make_command_exception(self, name: str, message: str) -> Optional[BaseException]:
        import subprocess  # as `restore`

        found = _COMMAND.match(message)
        if found is None:
            return None
        text = found.group(1)[1:-1]  # without the quotes; a list's repr, or the command line itself
        command = _literal(text) if text.startswith(("[", "(")) else text
        output = restore_outputs(self.result if isinstance(self.result, dict) else {})
        if name == "TimeoutExpired":
            return subprocess.TimeoutExpired(command, float(found.group(2) or 0), output["stdout"], output["stderr"])
        code = self.exit_code if self.exit_code is not None else 1
        return subprocess.CalledProcessError(
            128 - code if " died with " in message else code, command, output["stdout"], output["stderr"]
        )


def _find_class(name: str, scope: Dict[str, Any]) -> Optional[Type[BaseException]]:
    if name == "CancelledError" and "asyncio" in sys.modules:
        return sys.modules["asyncio"].CancelledError  # type: ignore[no-any-return]
    for candidate in (getattr(builtins, name, None), scope.get(name)):
        if isinstance(candidate, type) and issubclass(candidate, BaseException):
            return candidate
    found = {candidate for candidate in _loaded_classes(BaseException) if candidate.__name__ == name}
    return found.pop() if len(found) == 1 else None


def _loaded_classes(base: Type[BaseException]) -> Iterator[Type[BaseException]]:
    waiting, seen = [base], {base}
    while waiting and len(seen) < _CLASS_LIMIT:
        for kind in type.__subclasses__(waiting.pop()):
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
                yield kind


def _make_exception(kind: Type[BaseException], message: str) -> BaseException:
    """An instance whose text is `message`."""
    found = _OS_ERROR.match(message) if issubclass(kind, OSError) else None
    try:
        if found is not None:
            number, text, *names = found.groups()
            made: BaseException = OSError(int(number), text, *[_literal(path) for path in names[:1] if path])
            if isinstance(made, kind):
                return made
        if issubclass(kind, (KeyError, SystemExit)):
            return kind(_literal(message)) if message else kind()
        made = kind(message) if message else kind()
        if str(made) == message:
            return made
    except Exception:  # noqa: BLE001, S110 - foreign code: a constructor that wants something else
        pass
    made = kind.__new__(kind, message)
    made.args = (message,) if message else ()
    try:
        same = str(made) == message
    except Exception:  # noqa: BLE001 - as above: a __str__ that needs what the constructor would have set
        same = False
    if not same:
        speaking: Type[BaseException] = type(kind.__name__, (kind,), {"__str__": lambda self: message})
        made = speaking.__new__(speaking, message)
    return made


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
