"""`@tool`: a function whose calls are recorded, each followed by a snapshot."""

from __future__ import annotations

import functools
import inspect
from typing import (
    Any,
    AsyncGenerator,
    Awaitable,
    Callable,
    Dict,
    Generator,
    List,
    Optional,
    TypeVar,
    Union,
    cast,
    overload,
)

from snapshotd.agent.calls import Call, begin, begin_async, innermost
from snapshotd.agent.replay import Replayed, ReplayedError
from snapshotd.agent.spec import Compensation, Key, Spec

F = TypeVar("F", bound=Callable[..., Any])

ITEMS_LIMIT = 10000
"""Number of a generator's items that its record holds; later ones are passed on, not recorded, and counted."""


@overload
def tool(function: F) -> F: ...
@overload
def tool(
    *,
    name: Optional[str] = None,
    side_effect: str = "local",
    approve: Union[bool, str] = False,
    compensate: Optional[Compensation] = None,
    key: Optional[Key] = None,
    reuse: bool = True,
) -> Callable[[F], F]: ...
def tool(
    function: Optional[F] = None,
    *,
    name: Optional[str] = None,
    side_effect: str = "local",
    approve: Union[bool, str] = False,
    compensate: Optional[Compensation] = None,
    key: Optional[Key] = None,
    reuse: bool = True,
) -> Any:
    """Make `function` a recorded tool call, as `@tool` or `@tool(name="shell")`. Its arguments, result and exceptions
    stay as they are.

    Any function: sync, async, generator (recorded from the first item asked for to the last), method. The recorded
    result is JSON, with `repr` for other values; a result or exception of `subprocess.run` also sets the call's exit
    code. A program that is started again gets the recorded outcome instead of a run (replay.py): return JSON values
    where the program looks at their type.

    `name`: 1 to 200 printable characters, by default the function's own.
    `side_effect`: the effect of running it a second time. `local`: it only changes files, which go back with it;
    `idempotent`: none, under the same idempotency key (`current_call().key`); `irreversible`: it happens twice.
    `approve`: True or a question: a person has to agree to each call first. Raises Denied if they do not. The approver
    may change the arguments. Under asyncio other tasks go on meanwhile, and so do other threads.
    `compensate`: how to undo a call: a command (list of texts), or a function of a module's top level that takes one
    dict (`name`, `arguments`, `result`, `key`). It runs in a process of its own, which imports the function's file: a
    program that defines it has to start itself under `if __name__ == "__main__"`.
    `key`: an idempotency key of the program's own: a text that is formatted with the call's arguments, as
    `"order-{number}"`, or a function of them.
    `reuse`: False for a `local` tool whose outcome depends on more than its arguments and the files (the network, the
    clock, an object of the program): `snapshotd run --reuse` then runs it, and everything after it.

    The wrapped function raises SnapshotdUnavailable when the daemon goes away and does not come back, and
    SnapshotdError when it refuses (disk full, a program that leaves the recorded path); before the function ran if the
    intent could not be recorded, and instead of its result if the outcome could not.
    """
    options: Dict[str, Any] = {
        "side_effect": side_effect,
        "approve": approve,
        "compensate": compensate,
        "key": key,
        "reuse": reuse,
    }
    if function is None:
        return lambda inner: wrap(inner, name, **options)
    return wrap(function, name, **options)


def wrap(function: Any, name: Optional[str], **options: Any) -> Any:
    """The recorded form of a function. `options` as of `Spec`."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(wrap(function.__func__, name, **options))
    return recording(Spec(function, name, **options))


def recording(spec: Spec) -> Any:
    """The function of `spec`, recorded."""
    function = spec.function
    if inspect.iscoroutinefunction(function):
        return _async_tool(spec)
    if inspect.isgeneratorfunction(function):
        return _generator_tool(spec)
    if inspect.isasyncgenfunction(function):
        return _async_generator_tool(spec)
    return _sync_tool(spec)


def _sync_tool(spec: Spec) -> Callable[..., Any]:
    hidden = inspect.iscoroutinefunction(
        inspect.unwrap(spec.function)
    )  # another decorator hid that the function is async

    @functools.wraps(spec.function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = begin(spec, args, kwargs)
        if call.replayed is not None:
            return _again(spec, call.replayed) if hidden else spec.outcome(call.replayed)
        token = innermost.set(call)
        try:
            result = spec.function(*call.args, **call.kwargs)
        except BaseException as exc:
            call.fail(exc)
            raise
        finally:
            innermost.reset(token)
        if inspect.iscoroutine(result):
            return _await_and_end(spec, call, result)
        return spec.end(call, result)

    return wrapper


async def _again(spec: Spec, replayed: Replayed) -> Any:
    return spec.outcome(replayed)


def _async_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = await begin_async(spec, args, kwargs)
        if call.replayed is not None:
            return spec.outcome(call.replayed)

        async def work() -> Any:
            return await spec.function(*call.args, **call.kwargs)

        return await _await_and_end(spec, call, work())

    return wrapper


async def _await_and_end(spec: Spec, call: Call, work: Awaitable[Any]) -> Any:
    token = innermost.set(call)
    try:
        result = await work
    except BaseException as exc:
        call.fail(exc)
        raise
    finally:
        innermost.reset(token)
    return spec.end(call, result)


class Items:
    """The items that a generator has yielded, as they are recorded."""

    def __init__(self) -> None:
        self.items: List[Any] = []
        self.left_out = 0

    def add(self, item: Any) -> None:
        if len(self.items) < ITEMS_LIMIT:
            self.items.append(item)
        else:
            self.left_out += 1

    def record(self, **more: Any) -> Dict[str, Any]:
        return dict({"items": self.items}, **more, **({"left_out": self.left_out} if self.left_out else {}))


def items_of(replayed: Replayed) -> List[Any]:
    """The items to yield again; for a result that is no record of a generator (a person has edited it), the items of
    the list."""
    result = replayed.result
    found = result.get("items") if isinstance(result, dict) else result
    return found if isinstance(found, list) else []


def end_of(replayed: Replayed, spec: Spec) -> Any:
    """After the recorded items: the value that the generator returned, or its exception."""
    result = replayed.result if isinstance(replayed.result, dict) else {}
    if result.get("left_out"):
        raise ReplayedError(
            "{} items of {} were not recorded, only the first {}; the program cannot be replayed beyond them.".format(
                result["left_out"], spec.name, ITEMS_LIMIT
            )
        )
    if replayed.status != "done":
        raise replayed.exception(spec.scope)
    return result.get("return")


def _generator_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = begin(spec, args, kwargs)
        if call.replayed is not None:
            for item in items_of(call.replayed):
                yield spec.item(item)
            return end_of(call.replayed, spec)
        seen = Items()
        inner: Optional[Generator[Any, Any, Any]] = None
        step: Optional[Callable[[], Any]] = None
        while True:
            token = innermost.set(call)  # only while the tool's own code runs, not its consumer's
            try:
                if inner is None or step is None:
                    inner = cast("Generator[Any, Any, Any]", spec.function(*call.args, **call.kwargs))
                    step = functools.partial(next, inner)
                item = step()
            except StopIteration as stop:
                call.end(seen.record(**{"return": stop.value}))
                return stop.value
            except GeneratorExit:  # the consumer had enough
                call.end(seen.record(**{"return": None}))
                raise
            except BaseException as exc:
                call.fail(exc, seen.record())
                raise
            finally:
                innermost.reset(token)
            spec.observe(call, item)
            seen.add(spec.to_record(item))
            try:
                sent = yield item
                step = functools.partial(inner.send, sent)
            except BaseException as exc:  # noqa: BLE001 - thrown in by the consumer (GeneratorExit too): the tool's to handle
                step = functools.partial(inner.throw, exc)

    return wrapper


def _async_generator_tool(spec: Spec) -> Callable[..., Any]:
    @functools.wraps(spec.function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = await begin_async(spec, args, kwargs)
        if call.replayed is not None:
            for item in items_of(call.replayed):
                yield spec.item(item)
            end_of(call.replayed, spec)
            return
        seen = Items()
        inner: Optional[AsyncGenerator[Any, Any]] = None
        step: Optional[Callable[[], Awaitable[Any]]] = None
        while True:
            before = innermost.get()
            innermost.set(call)
            try:
                if inner is None or step is None:
                    inner = cast("AsyncGenerator[Any, Any]", spec.function(*call.args, **call.kwargs))
                    step = inner.__anext__
                item = await step()
            except (StopAsyncIteration, GeneratorExit) as end:
                call.end(seen.record())
                if isinstance(end, GeneratorExit):
                    raise
                return
            except BaseException as exc:
                call.fail(exc, seen.record())
                raise
            finally:
                innermost.set(before)  # not reset(): the next item may be asked for from another context
            spec.observe(call, item)
            seen.add(spec.to_record(item))
            try:
                sent = yield item
                step = functools.partial(inner.asend, sent)
            except BaseException as exc:  # noqa: BLE001 - as above
                step = functools.partial(inner.athrow, exc)

    return wrapper
