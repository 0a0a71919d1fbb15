"""`@tool`: a function whose calls are recorded, each followed by a snapshot.

A tool called from within a tool is part of the outer call: it runs as a plain function, without a record or snapshot of its own.
"Within" follows the context (contextvars): awaited coroutines, tasks and `asyncio.to_thread` belong to the outer call as long as it runs;
a thread that a tool starts by itself does not, and neither does a process started by `spawn`. A forked child of a running tool is part
of that tool.
"""

from __future__ import annotations

import functools
import inspect
import os
from contextvars import ContextVar
from typing import Any, AsyncGenerator, Awaitable, Callable, Dict, Generator, List, Optional, Tuple, TypeVar, cast, overload

from snapshotd.agent.connection import INLINE_LIMIT_BYTES
from snapshotd.agent.session import session
from snapshotd.agent.values import arguments, bound, clean, encode, plain, text_of

F = TypeVar("F", bound=Callable[..., Any])

ERROR_LIMIT_BYTES = 64 << 10
ITEMS_LIMIT = 10000
"""How many of a generator's items its record holds; later ones are passed on, not recorded."""

_current: "ContextVar[Optional[Call]]" = ContextVar("snapshotd_call", default=None)


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: Optional[str] = None) -> Callable[[F], F]: ...
def tool(function: Optional[F] = None, *, name: Optional[str] = None) -> Any:
    """Make `function` a recorded tool call, as `@tool` or `@tool(name="shell")`. Its arguments, result and exceptions stay as they are.

    Any function: sync, async, generator (recorded from the first item asked for to the last), method. `name`: 1 to 200 printable
    characters, by default the function's own. The recorded result is JSON, with `repr` for what is not; what `subprocess.run` returned or
    raised also sets the call's exit code.

    The wrapped function raises SnapshotdUnavailable when the daemon goes away, and SnapshotdError when it refuses (disk full); before the
    function ran if the intent could not be recorded, and instead of its result if the outcome could not.
    """
    if function is None:
        return lambda inner: _wrap(inner, name)
    return _wrap(function, name)


class Spec:
    """What is known about a tool before it is called."""

    def __init__(self, function: Callable[..., Any], name: Optional[str]) -> None:
        self.function = function
        self.name = clean(name if name is not None else getattr(function, "__name__", type(function).__name__))
        if not 1 <= len(self.name) <= 200 or not self.name.isprintable():
            raise ValueError("A tool's name has 1 to 200 printable characters; {!r} does not.".format(self.name))
        self.signature: Optional[inspect.Signature] = None
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            pass  # some built-in functions have none; their arguments are recorded by position
        self.receiver = _receiver(function, self.signature)

    def bind(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Dict[str, Any]:
        """Arguments by name, without a method's `self`. A call that does not fit the signature is recorded as it was made."""
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


def _receiver(function: Callable[..., Any], signature: Optional[inspect.Signature]) -> Optional[str]:
    """`self` or `cls` of a function defined in a class; its repr holds an address, which would differ in every run."""
    if signature is None or not signature.parameters:
        return None
    scope = getattr(function, "__qualname__", "").rpartition(".")[0]
    first = next(iter(signature.parameters))
    return first if scope and not scope.endswith("<locals>") and first in ("self", "cls") else None


class Call:
    """One recorded call that has begun."""

    __slots__ = ("id", "open", "pid")

    def __init__(self) -> None:
        self.id = os.urandom(16).hex()
        self.open = True
        self.pid = os.getpid()

    def done(self, result: Any) -> None:
        """Record the outcome, and return when the snapshot is taken."""
        fields: Dict[str, Any] = {"status": "done"}
        body: Optional[bytes] = None
        value = plain(result)
        encoded = encode(value)
        if len(encoded) > session.body_limit_bytes:
            value = "[not recorded: {} bytes of JSON, over the limit of {}]".format(len(encoded), session.body_limit_bytes)
            encoded = encode(value)
        if len(encoded) > INLINE_LIMIT_BYTES:
            body = encoded
        else:
            fields["result"] = value
        self._end(fields, body, result)

    def failed(self, error: BaseException) -> None:
        """Record the exception, and return when the snapshot is taken."""
        try:
            message = clean(str(error))
        except Exception:  # noqa: BLE001 - foreign code: an exception's __str__ may raise anything
            message = text_of(error)
        kind = type(error).__name__
        text = "{}: {}".format(kind, message) if message else kind
        self._end({"status": "failed", "error": bound(text, ERROR_LIMIT_BYTES)}, None, error)

    def _end(self, fields: Dict[str, Any], body: Optional[bytes], outcome: Any) -> None:
        self.open = False
        if self.pid != os.getpid():
            return  # a child that was forked inside the tool returns too; the call is its parent's
        code = _exit_code(outcome)
        if code is not None:
            fields["exit_code"] = code
        fields["call"] = self.id
        session.request("call_end", fields, body, park=True)


def _exit_code(outcome: Any) -> Optional[int]:
    """The exit code a result or exception carries, as a shell counts it (128+N for signal N)."""
    if type(outcome).__module__ != "subprocess":
        return None
    code = getattr(outcome, "returncode", None)
    if not isinstance(code, int) or not -128 < code < 256:
        return None
    return code if code >= 0 else 128 - code


def _begin(spec: Spec, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Optional[Call]:
    """Record the intent. None when nothing is to be recorded: outside of a sandbox, or within another tool."""
    outer = _current.get()
    if (outer is not None and outer.open) or not session.inside():
        return None
    call = Call()
    session.request("call_begin", {"call": call.id, "name": spec.name, "arguments": arguments(spec.bind(args, kwargs))})
    return call


def _wrap(function: Any, name: Optional[str]) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_wrap(function.__func__, name))
    spec = Spec(function, name)
    if inspect.iscoroutinefunction(function):
        return _async_tool(spec)
    if inspect.isgeneratorfunction(function):
        return _generator_tool(spec)
    if inspect.isasyncgenfunction(function):
        return _async_generator_tool(spec)
    return _sync_tool(spec)


def _sync_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = _begin(spec, args, kwargs)
        if call is None:
            return spec.function(*args, **kwargs)
        token = _current.set(call)
        try:
            result = spec.function(*args, **kwargs)
        except BaseException as exc:
            call.failed(exc)
            raise
        finally:
            _current.reset(token)
        if inspect.iscoroutine(result):  # another decorator hid that the function is async
            return _awaited(call, result)
        call.done(result)
        return result

    return wrapper


def _async_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = _begin(spec, args, kwargs)
        if call is None:
            return await spec.function(*args, **kwargs)
        return await _awaited(call, spec.function(*args, **kwargs))

    return wrapper


async def _awaited(call: Call, work: Awaitable[Any]) -> Any:
    token = _current.set(call)
    try:
        result = await work
    except BaseException as exc:
        call.failed(exc)
        raise
    finally:
        _current.reset(token)
    call.done(result)
    return result


def _generator_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = _begin(spec, args, kwargs)
        if call is None:
            return (yield from spec.function(*args, **kwargs))
        inner = cast("Generator[Any, Any, Any]", spec.function(*args, **kwargs))
        items: List[Any] = []
        step: Callable[[], Any] = functools.partial(next, inner)
        while True:
            token = _current.set(call)  # only while the tool's own code runs, not its consumer's
            try:
                item = step()
            except StopIteration as stop:
                call.done({"items": items, "return": stop.value})
                return stop.value
            except GeneratorExit:  # the consumer had enough
                call.done({"items": items, "return": None})
                raise
            except BaseException as exc:
                call.failed(exc)
                raise
            finally:
                _current.reset(token)
            if len(items) < ITEMS_LIMIT:
                items.append(item)
            try:
                sent = yield item
                step = functools.partial(inner.send, sent)
            except BaseException as exc:  # noqa: BLE001 - thrown in by the consumer (GeneratorExit too): the tool's to handle
                step = functools.partial(inner.throw, exc)

    return wrapper


def _async_generator_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = _begin(spec, args, kwargs)
        inner = cast("AsyncGenerator[Any, Any]", spec.function(*args, **kwargs))
        items: List[Any] = []
        step: Callable[[], Awaitable[Any]] = inner.__anext__
        while True:
            before = _current.get()
            if call is not None:
                _current.set(call)
            try:
                item = await step()
            except StopAsyncIteration:
                if call is not None:
                    call.done({"items": items})
                return
            except GeneratorExit:
                if call is not None:
                    call.done({"items": items})
                raise
            except BaseException as exc:
                if call is not None:
                    call.failed(exc)
                raise
            finally:
                _current.set(before)  # not reset(): the next item may be asked for from another context
            if call is not None and len(items) < ITEMS_LIMIT:
                items.append(item)
            try:
                sent = yield item
                step = functools.partial(inner.asend, sent)
            except BaseException as exc:  # noqa: BLE001 - as above
                step = functools.partial(inner.athrow, exc)

    return wrapper
