"""Dataclasses that are made when they are first used. `dataclass` writes and compiles the methods of a class, 0.3 ms for
each; a command uses three or four of the client's sixty records."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool):
        """As `dataclasses.dataclass`."""

        def later(cls: type) -> type:
            cls._made, cls.__new__, cls.__dataclass_fields__ = False, _new, _Fields(frozen)
            return cls

        return later


_MAKING = threading.RLock()


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The `__new__` of a record: there is no instance, and no look for `__init__`, before the class is complete."""
    if not cls._made:
        dataclasses.fields(cls)
        with _MAKING:  # another thread may be at it
            pass
    return object.__new__(cls)


class _Fields:
    """Stands in for a record's `__dataclass_fields__`: the first look at it makes the class a dataclass."""

    def __init__(self, frozen: bool) -> None:
        self._frozen = frozen

    def __get__(self, instance: object, cls: type) -> Any:
        with _MAKING:
            if vars(cls).get("__dataclass_fields__") is self:  # another thread may have been first
                dataclasses.dataclass(frozen=self._frozen)(cls)
                cls._made = True  # type: ignore[attr-defined]
        return cls.__dataclass_fields__  # type: ignore[attr-defined]
