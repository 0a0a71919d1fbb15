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
            cls.__init__ = _first_init
            cls.__dataclass_fields__ = _Fields(frozen)
            return cls

        return later


_MAKING = threading.RLock()


def _first_init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for a record's `__init__` until the first one is made."""
    dataclasses.fields(self)
    self.__init__(*args, **kwargs)


class _Fields:
    """Stands in for a record's `__dataclass_fields__`: the first look at it makes the class a dataclass."""

    def __init__(self, frozen: bool) -> None:
        self._frozen = frozen

    def __get__(self, instance: object, cls: type) -> Any:
        with _MAKING:
            if vars(cls).get("__dataclass_fields__") is self:  # another thread may have been first
                del cls.__dataclass_fields__  # type: ignore[attr-defined]
                del cls.__init__  # type: ignore[misc]
                dataclasses.dataclass(frozen=self._frozen)(cls)
        return cls.__dataclass_fields__  # type: ignore[attr-defined]
