"""Runs tests with both clients: as it is, and with the asynchronous classes in place of the ones for threads.

A module, or a test, asks for it with `pytest.mark.usefixtures("both_clients")`. With asyncio, the names `Snapshotd`,
`Sandbox` and so on of the module are then `Blocking` ones, which run every coroutine on a loop until it ends. So the
suite of the one client is the suite of the other.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from snapshotd import client
from snapshotd.client.twofold import Twofold

_END_S = 60.0
"""A task ends that closes an iterator which was left early."""

NAMES = [name.removeprefix("Async") for name in client.__all__ if name.startswith("Async")]


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._failures = list[str]()
        self._loop.set_exception_handler(lambda _, context: self._failures.append(repr(context)))
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop")
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        async def awaited() -> Any:
            return await coroutine

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        async def called() -> Any:
            return function(*args, **kwargs)

        return self.run(called())

    def close(self) -> None:
        """AssertionError: a task failed and nobody looked, or some are left."""

        async def last_tasks() -> set[asyncio.Task[Any]]:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            return (await asyncio.wait(tasks, timeout=_END_S))[1] if tasks else set()

        left = self.run(last_tasks())
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert (left, self._failures) == (set(), [])


class Blocking:
    """Something of the asynchronous client as if it were one for threads."""

    def __init__(self, loop: Loop, inner: Any) -> None:
        vars(self).update(_loop=loop, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return wrapped(self._loop, getattr(self._inner, name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._loop.call(
            self._inner, *map(_unwrapped, args), **{key: _unwrapped(value) for key, value in kwargs.items()}
        )
        return wrapped(self._loop, result)

    def __enter__(self) -> Any:
        return wrapped(self._loop, self._loop.run(self._inner.__aenter__()))

    def __exit__(self, *exc: Any) -> Any:
        return self._loop.run(self._inner.__aexit__(*exc))

    def __repr__(self) -> str:
        return repr(self._inner)


def wrapped(loop: Loop, value: Any) -> Any:
    if inspect.isawaitable(value):
        return wrapped(loop, loop.run(value))
    if inspect.isasyncgen(value) or hasattr(value, "__anext__"):
        return _iterated(loop, value)
    if isinstance(value, list):
        return [wrapped(loop, item) for item in value]
    if isinstance(value, Twofold) or inspect.ismethod(value):
        return Blocking(loop, value)
    return value


def _unwrapped(value: Any) -> Any:
    return value._inner if isinstance(value, Blocking) else value


def _iterated(loop: Loop, iterator: Any) -> Iterator[Any]:
    try:
        while True:
            try:
                yield wrapped(loop, loop.run(anext(iterator)))
            except StopAsyncIteration:
                return
    finally:
        loop.run(iterator.aclose())


@contextmanager
def asynchronous(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Iterator[None]:
    """Within the block, the client's classes in these modules are the asynchronous ones."""
    loop = Loop()
    try:
        with monkeypatch.context() as patch:
            for module in modules:
                for name in NAMES:
                    if hasattr(module, name):
                        patch.setattr(module, name, Blocking(loop, getattr(client, f"Async{name}")))
            yield
    finally:
        loop.close()
