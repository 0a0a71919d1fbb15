"""One function for both clients.

A verb is written once, as a coroutine over the connections of `links.py`. An asynchronous class hands the coroutine to its
caller. A class for threads (`Blocking`) runs it to its end at once: its connections block, so the coroutine never
suspends. The descriptors here have both types, so neither a signature nor a docstring stands twice:

    @verb              async def f(...) -> R                  R                  a coroutine of R
    @class_verb        the same, of a class
    @attribute         async def f(self) -> R                 R, as a property   a coroutine of R
    @stream            async def f(...) -> AsyncIterator[T]   Iterator[T]        AsyncItems[T], an AsyncIterator
    @on_this_machine   def f(client: Snapshotd, ...) -> R     R                  a coroutine of R; it runs in a thread

Each checks its arguments by their annotations (UsageError). In a verb, `self` is always the asynchronous form:
`await self.snapshot(ref)` calls another verb in both clients.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from snapshotd.client.local.signatures import Signature

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def run(work: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine over connections that block. RuntimeError: it waits for an event loop."""
    try:
        work.send(None)
    except StopIteration as ended:
        return cast(R, ended.value)
    work.close()
    raise RuntimeError("a verb waits for an event loop in a thread that has none")


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """The items of an asynchronous iterator over connections that block. Closing this closes that."""
    generator = cast(AsyncGenerator[T, None], items)
    try:
        while True:
            try:
                item = run(generator.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(generator.aclose())


class Twofold:
    """A class that exists in two forms: as it is, and with `Blocking` in front of it."""

    @property
    def _coroutines(self) -> Self:
        """This object, with verbs that are coroutines."""
        return self


class Blocking(Twofold):
    """The form for threads."""

    _waiting: type[Any] | None = None
    _blocks = True

    @property
    def _coroutines(self) -> Self:
        cls = type(self)
        if not cls._blocks:
            return self
        if "_waiting" not in cls.__dict__ or cls._waiting is None:
            cls._waiting = type(cls.__name__, (cls,), {"_blocks": False})
        view: Self = object.__new__(cls._waiting)
        view.__dict__ = self.__dict__
        return view

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, the form that `_coroutines` makes is the one that it was made of."""
        cls = type(self)
        if cls._blocks:
            return super().__reduce_ex__(protocol)
        blocking: Any = object.__new__(cls.__bases__[0])
        blocking.__dict__ = self.__dict__
        return getattr, (blocking, "_coroutines")


class BlockingContext(Blocking):
    """The form for threads of a class that is used as a context manager."""

    def __enter__(self) -> Self:
        run(self._context.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        run(self._context.__aexit__(*exc))

    @property
    def _context(self) -> Any:
        return self._coroutines


class _Verb:
    """Base of the descriptors: it has the functions that they give to the two forms of a class."""

    def _give(self, verb: Callable[..., Any], blocking: Callable[..., Any], waiting: Callable[..., Any]) -> None:
        self.__doc__ = verb.__doc__
        self._verb, self._blocking, self._waiting = verb, blocking, waiting
        self._is_wrapped = False

    def _wrap(self) -> None:
        for given in {self._blocking, self._waiting} - {self._verb}:
            functools.update_wrapper(given, self._verb)

    def _bind(self, instance: Any, owner: type[Any]) -> Any:
        if not self._is_wrapped:  # at the first look: there are 130 verbs, and a program uses three
            self._wrap()
            self._is_wrapped = True
        function = self._blocking if issubclass(owner, Blocking) and owner._blocks else self._waiting
        return function if instance is None else MethodType(function, instance)


class verb(_Verb, Generic[P, R]):  # noqa: N801 - this and those below are written as decorators
    """See the module."""

    def __init__(self, verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        signature = Signature(verb)

        def blocking(instance: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            return run(waiting(instance._coroutines, *args, **kwargs))

        async def waiting(instance: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            signature.check(args, kwargs)
            return await verb(instance, *args, **kwargs)

        self._give(verb, blocking, waiting)

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: Twofold, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[..., Any]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self._bind(instance, owner)


class class_verb(_Verb, Generic[P, R]):  # noqa: N801
    """See the module."""

    def __init__(self, verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        signature = Signature(verb)

        def blocking(cls: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            return run(waiting(cls, *args, **kwargs))

        async def waiting(cls: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            signature.check(args, kwargs)
            return await verb(cls, *args, **kwargs)

        self._give(verb, blocking, waiting)

    @overload
    def __get__(self, instance: object, owner: type[Blocking]) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type[Twofold]) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, instance: object, owner: type) -> Any:
        return self._bind(owner, owner)


class attribute(_Verb, Generic[R]):  # noqa: N801
    """See the module."""

    def __init__(self, verb: Callable[[Any], Coroutine[Any, Any, R]]) -> None:
        self._give(verb, lambda instance: run(verb(instance._coroutines)), verb)

    @overload
    def __get__(self, instance: Blocking, owner: type) -> R: ...
    @overload
    def __get__(self, instance: Twofold, owner: type) -> Coroutine[Any, Any, R]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self._bind(instance, owner)()


class AsyncItems(AsyncIterator[T]):
    """The answer of a `stream`. The request is made when the iteration begins, or by `begin`."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, AsyncIterator[T]]]) -> None:
        self.begin = begin
        self._items: AsyncIterator[T] | None = None
        self._closed = False

    async def __anext__(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        if self._items is None:
            self._items = await self.begin()
        return await anext(self._items)

    async def aclose(self) -> None:
        """Break the request off, if it was made."""
        self._closed = True
        if self._items is not None:
            await cast(AsyncGenerator[T, None], self._items).aclose()


class stream(_Verb, Generic[P, T]):  # noqa: N801
    """See the module. The request is made when the verb returns: for threads at once, else when the iteration begins."""

    def __init__(self, verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncIterator[T]]]) -> None:
        signature = Signature(verb)

        def blocking(instance: Any, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
            return iterate(run(begun(instance._coroutines, *args, **kwargs)))

        def waiting(instance: Any, *args: P.args, **kwargs: P.kwargs) -> AsyncItems[T]:
            return AsyncItems(lambda: begun(instance, *args, **kwargs))

        async def begun(instance: Any, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
            signature.check(args, kwargs)
            return await verb(instance, *args, **kwargs)

        self._give(verb, blocking, waiting)

    def _wrap(self) -> None:
        super()._wrap()
        vars(self._blocking)["__wrapped__"] = _returning_iterator(self._verb)

    @overload
    def __get__(self, instance: Blocking, owner: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, instance: Twofold, owner: type) -> Callable[P, AsyncItems[T]]: ...
    @overload
    def __get__(self, instance: None, owner: type) -> Callable[..., Any]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        return self._bind(instance, owner)


def _returning_iterator(verb: Any) -> Callable[..., Any]:
    """A copy of a stream's function for `inspect.signature`, which tells what the form for threads returns."""
    told = FunctionType(verb.__code__, verb.__globals__, verb.__name__, verb.__defaults__)
    told.__kwdefaults__ = verb.__kwdefaults__
    told.__annotations__ = {**verb.__annotations__, "return": verb.__annotations__["return"].removeprefix("Async")}
    return told


class on_this_machine(verb[P, R]):  # noqa: N801
    """See the module. For verbs that work on files of this machine, which Linux reads and writes in no other way."""

    def __init__(self, verb: Callable[Concatenate[Snapshotd, P], R]) -> None:
        signature = Signature(verb)

        def blocking(instance: Snapshotd, *args: P.args, **kwargs: P.kwargs) -> R:
            signature.check(args, kwargs)
            return verb(instance, *args, **kwargs)

        async def waiting(instance: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, await instance._in_thread(blocking, *args, **kwargs))

        self._give(verb, blocking, waiting)


def closing(items: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """A block at whose end an answer is closed, also when the iteration over it is left early."""
    return aclosing(cast(AsyncGenerator[T, None], items))
