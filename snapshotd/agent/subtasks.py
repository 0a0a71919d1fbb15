"""Subtasks: named parts of the work, with dependencies, that a resumed program does not do again."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Type, TypeVar, cast

from snapshotd.agent.calls import Call, begin, begin_async, subtask, within
from snapshotd.agent.session import session
from snapshotd.agent.spec import Spec
from snapshotd.agent.wire.connection import SnapshotdError
from snapshotd.agent.wire.values import bound, clean, label, text_of

F = TypeVar("F", bound=Callable[..., Any])
STATUSES = ("pending", "in-progress", "completed", "failed", "skipped")
NOTE_LIMIT_BYTES = 4 << 10


class TaskSkipped(BaseException):
    """Raised to leave a task. Not an Exception, so that the task's own handlers let it pass."""

    def __init__(self, why: str, task: "Optional[Task]") -> None:
        super().__init__(why)
        self.task = task


class Task:
    """One subtask, used as `with task("build", depends=["plan"]) as t:` or as a decorator. See `task`."""

    def __init__(self, name: Optional[str], depends: Sequence[str]) -> None:
        if isinstance(depends, str):
            raise TypeError("depends is a list of names of tasks, not a text.")
        self.name = None if name is None else label("A task's name", name)
        self.depends = [label("A task's name", other) for other in depends]
        self.result: Any = None
        """The task's result, a JSON value: recorded when it completes."""
        self._call: Optional[Call] = None
        self._token: "Optional[Token[Optional[str]]]" = None

    def skip(self, why: str = "") -> None:
        """Leave the task here, as skipped. Tasks that depend on it cannot begin."""
        raise TaskSkipped(why, self)

    def __call__(self, function: F) -> F:
        return cast(F, _decorate(function, self.name, self.depends))

    def __enter__(self) -> "Task":
        self._enter(begin(self._declare(Spec(self._body, self.name, kind="task")), (), {}))
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> bool:
        return self._exit(error)

    async def __aenter__(self) -> "Task":
        return self.__enter__()

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> bool:
        return self._exit(error)

    def _body(self) -> None:
        """Stands in for the function of a `with` block."""

    def _declare(self, spec: Spec) -> Spec:
        """Declare the task as in progress, and return `spec`. The daemon refuses it (Conflict) if it depends on a task that has not
        completed."""
        if self.name is None:
            raise TypeError('A task in a with statement needs a name: with task("name"):')
        change(self.name, "in-progress", depends=self.depends)
        return spec

    def _enter(self, call: Call) -> None:
        self._call = call
        self._token = subtask.set(self.name)

    def _exit(self, error: Optional[BaseException]) -> bool:
        """Record how it ended. Its status is changed before its call ends, so that the snapshot which that takes has
        it."""
        call, token = self._call, self._token
        assert call is not None
        assert token is not None
        self._call = self._token = None
        subtask.reset(token)
        name = cast(str, self.name)
        if call.pid != os.getpid():
            return False  # a child that was forked in the task comes here too; the task is its parent's
        if error is None:
            change(name, "completed")
            call.end(self.result)
            return False
        if isinstance(error, TaskSkipped):
            change(name, "skipped", note=clean(str(error)))
            call.end(None)
            return error.task in (None, self)  # else an outer task is skipped, and this one with it
        change(name, "failed", note="{}: {}".format(type(error).__name__, text_of(error)))
        call.fail(error)
        return False


class _Tasks:
    """`task` itself."""

    def __call__(self, name: Any = None, *, depends: Sequence[str] = ()) -> Any:
        """A subtask. Three forms:

            with task("build", depends=["plan"]) as t:      # t.skip("why"), t.result = ...
            @task("build", depends=["plan"])                # or @task; the function, sync or async, is the task
            task.plan("plan", "build")                      # declares tasks that are still to be done: pending

        A task completes when its block or function ends, fails with the exception that leaves it, or is skipped. A task
        whose dependency has not completed is refused (SnapshotdError, `Conflict`). In a replay a decorated function
        that completed is not run: its recorded result is returned. The block of a `with` always runs; its calls are
        answered from the record. Tools and models called in it are recorded as parts of it. `name`: 1 to 200 printable
        characters.
        """
        if callable(name):
            return _decorate(name, None, list(depends))
        return Task(name, depends)

    def plan(self, *names: str) -> None:
        """Declare tasks, in this order, as pending."""
        for name in names:
            change(label("A task's name", name), "pending")

    def skip(self, why: str = "") -> None:
        """Leave the innermost task here, as skipped: for functions, which have no `t`."""
        if subtask.get() is None:
            raise SnapshotdError("No task runs here that could be skipped.", "UsageError")
        raise TaskSkipped(why, None)


task = _Tasks()


def tasks() -> List[Dict[str, Any]]:
    """All subtasks in the order in which they were declared, as `{"name", "status", "depends", "note"}`."""
    if session.inside():
        return cast(List[Dict[str, Any]], session.request("tasks", {})["body"])
    with _lock:
        return [dict(entry, depends=list(entry["depends"])) for entry in _outside.values()]


def _decorate(function: Any, name: Optional[str], depends: List[str]) -> Any:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("A generator cannot be a task; use `with task(...)` in it.")
    spec = Spec(function, name, kind="task")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            current = Task(spec.name, depends)
            call = await begin_async(current._declare(spec), args, kwargs, skippable=True)
            if call.replayed is not None:
                return spec.outcome(call.replayed)
            with _running(current, call):
                current.result = await function(*args, **kwargs)
            return current.result

        return async_wrapper

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        current = Task(spec.name, depends)
        call = begin(current._declare(spec), args, kwargs, skippable=True)
        if call.replayed is not None:
            return spec.outcome(call.replayed)
        with _running(current, call):
            current.result = function(*args, **kwargs)
        return current.result

    return wrapper


@contextmanager
def _running(current: Task, call: Call) -> Iterator[None]:
    """The function of a task whose call has begun runs inside the block."""
    current._enter(call)
    try:
        yield
    except BaseException as exc:
        if not current._exit(exc):
            raise
    else:
        current._exit(None)


# -- statuses ----------------------------------------------------------------------------------------------------------

_outside: Dict[str, Dict[str, Any]] = {}
"""The tasks of a program outside of a sandbox."""
_lock = threading.Lock()


def change(name: str, status: str, depends: Sequence[str] = (), note: str = "") -> None:
    """Declare a task, or change its status. SnapshotdError (`Conflict`): it depends on one that has not completed."""
    if not session.inside():
        with _lock:
            _change_outside(name, status, depends, note)
        return
    fields: Dict[str, Any] = dict(within(), name=name, status=status)
    if depends:
        fields["depends"] = list(depends)
    if note:
        fields["note"] = bound(note, NOTE_LIMIT_BYTES)
    session.request("task", fields)


def _change_outside(name: str, status: str, depends: Sequence[str], note: str) -> None:
    for other in depends:
        found = _outside.get(other, {"status": "not declared"})["status"]
        if found != "completed":
            raise SnapshotdError(
                "The task {} depends on {}, which is {}; complete that first.".format(name, other, found), "Conflict"
            )
    entry = _outside.setdefault(name, {"name": name, "status": status, "depends": [], "note": None})
    entry.update(status=status, note=note or None)
    if depends:
        entry["depends"] = list(depends)
