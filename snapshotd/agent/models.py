"""`model`: calls of a language model. Request and reply are recorded with usage; no snapshot is taken, since a model
changes no file.

A replayed call returns the recorded reply: JSON objects that also have their fields as attributes, so that a program
which reads `reply.choices[0].message` reads the same from the record.
"""

from __future__ import annotations

import inspect
from typing import Any, AsyncIterator, Callable, Dict, Generator, Iterator, Optional

from snapshotd.agent.calls import Call
from snapshotd.agent.replay import Replayed
from snapshotd.agent.spec import Spec
from snapshotd.agent.tools import Items, end_of, items_of, recording
from snapshotd.agent.wire.values import plain, text_of

_USAGE_FIELDS = 32
_RENAMED = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
_DEPTH = 32


def model(
    function: Any = None, request: Any = None, *, name: Optional[str] = None, call: Optional[Callable[[], Any]] = None
) -> Any:
    """Record a model call. Three forms:

        @model                                         # or @model(name="gpt"); the function's arguments are the request
        def ask(prompt): return client.create(...)

        reply = model("gpt", request, call=lambda: client.create(**request))

    The function may be sync, async, a generator of chunks, or return an iterator of chunks (sync or async; recorded to
    its end, which the program has to reach). The return value of a provider's library is recorded as JSON if it has
    `model_dump` or `to_dict`; its usage is found if it is OpenAI's or Anthropic's form, else say it with
    `record_usage`. Requests are recorded up to 7 MiB.

    Raises the function's exceptions, SnapshotdError and SnapshotdUnavailable.
    """
    if call is not None:
        if not isinstance(function, str):
            raise TypeError("The first argument of model() is the model's name when `call` is given.")
        return recording(_Direct(call, function, kind="model"))(request)
    if function is None:
        return lambda inner: recording(_Model(inner, name, kind="model"))
    if not callable(function):
        raise TypeError("model() wants a function; give the call of {!r} as call=lambda: ...".format(function))
    return recording(_Model(function, name, kind="model"))


class Reply(Dict[str, Any]):
    """A JSON object of a recorded reply; its fields are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __await__(self) -> Generator[Any, None, Any]:
        """A program that awaited the reply awaits it again, wherever the coroutine came from."""
        yield from ()
        return self


def _reply(value: Any) -> Any:
    if isinstance(value, dict):
        return Reply((key, _reply(item)) for key, item in value.items())
    return [_reply(item) for item in value] if isinstance(value, list) else value


class _Model(Spec):
    """A function that calls a model."""

    def to_record(self, value: Any) -> Any:
        return _dump(value, 0)

    def observe(self, call: Call, value: Any) -> None:
        call.reported.update(usage_of(value))

    def end(self, call: Call, result: Any) -> Any:
        if hasattr(result, "__next__"):
            return _record_stream(self, call, result)
        if hasattr(result, "__anext__") or (hasattr(result, "__aiter__") and not isinstance(result, dict)):
            return _record_stream_async(self, call, result)
        self.observe(call, result)
        return super().end(call, result)

    def outcome(self, replayed: Replayed) -> Any:
        result = replayed.result
        if isinstance(result, dict) and result.get("streamed") in ("sync", "async"):
            return _again(self, replayed) if result["streamed"] == "sync" else _AsyncStream(self, replayed)
        return _reply(replayed.outcome(self.scope))

    def item(self, recorded: Any) -> Any:
        return _reply(recorded)


class _Direct(_Model):
    """The function of `model(name, request, call=function)`, which takes no arguments: the request is only recorded."""

    def __init__(self, function: Callable[[], Any], name: str, **options: Any) -> None:
        async def await_it(request: Any) -> Any:
            return await function()

        super().__init__(
            await_it if inspect.iscoroutinefunction(function) else lambda request: function(), name, **options
        )
        self.scope = getattr(function, "__globals__", {})


def _record_stream(spec: Spec, call: Call, stream: Iterator[Any]) -> Iterator[Any]:
    seen = Items()
    try:
        for item in stream:
            spec.observe(call, item)
            seen.add(spec.to_record(item))
            yield item
    except GeneratorExit:  # the program had enough
        call.end(seen.record(streamed="sync"))
        raise
    except BaseException as exc:
        call.fail(exc, seen.record(streamed="sync"))
        raise
    call.end(seen.record(streamed="sync"))


async def _record_stream_async(spec: Spec, call: Call, stream: Any) -> AsyncIterator[Any]:
    seen = Items()
    try:
        async for item in stream:
            spec.observe(call, item)
            seen.add(spec.to_record(item))
            yield item
    except GeneratorExit:
        call.end(seen.record(streamed="async"))
        raise
    except BaseException as exc:
        call.fail(exc, seen.record(streamed="async"))
        raise
    call.end(seen.record(streamed="async"))


def _again(spec: Spec, replayed: Replayed) -> Iterator[Any]:
    for item in items_of(replayed):
        yield spec.item(item)
    end_of(replayed, spec)


class _AsyncStream:
    """A recorded stream of chunks for a program that reads it asynchronously, and may have awaited it first."""

    def __init__(self, spec: Spec, replayed: Replayed) -> None:
        self._items = _again(spec, replayed)

    def __aiter__(self) -> "_AsyncStream":
        return self

    async def __anext__(self) -> Any:
        for item in self._items:
            return item
        raise StopAsyncIteration

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self


def _dump(value: Any, depth: int) -> Any:
    """A reply as JSON: objects of providers' libraries can convert themselves."""
    if depth > _DEPTH or isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, dict):
        return {key: _dump(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dump(item, depth + 1) for item in value]
    dump = getattr(value, "model_dump", None)
    options = {"mode": "json"} if callable(dump) else {}
    dump = dump if callable(dump) else getattr(value, "to_dict", None)
    if not callable(dump):
        return value
    try:
        return dump(**options)
    except Exception:  # noqa: BLE001 - foreign code: what it cannot say of itself is recorded as its repr
        return text_of(value)


def usage_of(reply: Any) -> Dict[str, Any]:
    """The numbers of a reply's `usage` (or its `message`'s: the first event of an Anthropic stream), with the
    conventional names."""
    usage = _field(reply, "usage")
    if usage is None:
        usage = _field(_field(reply, "message"), "usage")
    if usage is None:
        return {}
    named = _dump(usage, 0)
    if not isinstance(named, dict):
        named = dict(getattr(usage, "__dict__", {}))
    found: Dict[str, Any] = {}
    for name, given in list(named.items())[:_USAGE_FIELDS]:
        amount = plain(given)
        if isinstance(name, str) and isinstance(amount, (int, float)) and not isinstance(amount, bool):
            found[_RENAMED.get(name, name)] = amount
    return found


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
