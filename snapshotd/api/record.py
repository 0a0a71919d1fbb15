"""The base of the API's records. Both sides of the socket use them, so this is standard library only, and cheap to
import: a record becomes a dataclass when it is first used, and knows its JSON by the types of its fields.

`dataclasses` is 10 ms to import, and writes and compiles the methods of a class, 0.3 ms for each; a command uses three or
four of a hundred records. The docstring of a field is its description in docs/openapi.json.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Hashable
from functools import cache, partial
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = [
    "UNSET",
    "About",
    "ApiRecord",
    "Base64Bytes",
    "Base64Text",
    "Bounds",
    "FullPath",
    "Json",
    "OneOf",
    "RelativePath",
    "Request",
    "SandboxPath",
    "Secret",
    "decode",
    "encode",
    "encode_given",
    "encode_masked",
    "field",
    "is_secret",
    "record",
    "records_in",
    "replace",
    "types_of",
    "unset",
    "without_defaults",
]

Json = dict[str, Any]
A = TypeVar("A")
_Make = Callable[[Any], Any]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
    from dataclasses import field, replace
else:

    class field:  # noqa: N801
        """As `dataclasses.field`: what that is given when the class becomes a dataclass."""

        def __init__(self, **options: Any) -> None:
            self.options = options

    def replace(value: A, **changes: Any) -> A:
        """As `dataclasses.replace`."""
        from dataclasses import replace as replace_in

        return replace_in(value, **changes)

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
        _ = cls.__dataclass_fields__
        with _MAKING:  # another thread may be at it
            pass
    return object.__new__(cls)


class _Fields:
    """Stands in for a record's `__dataclass_fields__`: the first look at it makes the class a dataclass."""

    def __init__(self, frozen: bool) -> None:
        self._frozen = frozen

    def __get__(self, instance: object, cls: Any) -> Any:
        cls = next(one for one in cls.__mro__ if "__dataclass_fields__" in vars(one))  # not a user's class below it
        with _MAKING:
            if vars(cls)["__dataclass_fields__"] is self:  # another thread may have been first
                import dataclasses

                for name, value in list(vars(cls).items()):
                    if isinstance(value, field):  # type: ignore[arg-type]
                        setattr(cls, name, dataclasses.field(**value.options))
                dataclasses.dataclass(frozen=self._frozen)(cls)
                cls._made = True
        return cls.__dataclass_fields__


class _MatchArgs:
    """Stands in for the `__match_args__` of records that are no dataclass yet."""

    def __get__(self, instance: object, cls: Any) -> Any:
        _ = cls.__dataclass_fields__
        return cls.__match_args__


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""Stands for a field that is left out, where None is a value."""


def unset() -> Any:
    """The default of such a field."""
    return field(default_factory=_unset)


def _unset() -> Any:
    return UNSET


class Bounds:
    """Bounds of a field: `ge`, `gt`, `le`, `lt`, `min_length`, `max_length`, `pattern`, `allow_inf_nan`. The daemon
    validates requests by them, with pydantic."""

    def __init__(self, **bounds: Any) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Json]) -> Json:
        return {**handler(source), **self._bounds}

    def excludes(self, value: Any) -> str | None:
        """The values that are within, in words, if this one is not."""
        measure = value if isinstance(value, int | float) else len(value)
        low, high = (self._bounds.get(name) for name in ("ge", "le"))
        if measure is not value:
            low, high = (self._bounds.get(name) for name in ("min_length", "max_length"))
        above, below = self._bounds.get("gt"), self._bounds.get("lt")
        if (
            (low is None or measure >= low)
            and (high is None or measure <= high)
            and (above is None or measure > above)
            and (below is None or measure < below)
            and measure == measure  # no NaN
        ):
            return None
        ends = ((low, "at least"), (above, "above"), (high, "at most"), (below, "below"))
        said = " and ".join(
            f"{word} {end:g}" if isinstance(end, float) else f"{word} {end}" for end, word in ends if end is not None
        )
        return (
            f"a number {said}"
            if measure is value
            else f"{'text' if isinstance(value, str) else 'a list'} whose length is {said}"
        )


class OneOf:
    """A text that is one of these."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Json]) -> Json:
        return {"type": "literal", "expected": self.texts}

    def excludes(self, value: Any) -> str | None:
        """As those of `Bounds`."""
        return None if value in self.texts else " or ".join(map(repr, self.texts))


class About:
    """The description of an argument that stands in a request's query."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Hidden:
    """Marks text that is recorded nowhere in plain."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Json]) -> Json:
        return {**handler(schema), "format": "password", "writeOnly": True}


Secret = Annotated[str, _Hidden()]


class _Path:
    """A sandbox path, from its root, as every method takes it. A byte that is not UTF-8 is a lone surrogate, as in
    Python's own paths; `os.fsencode` gives all bytes back. In JSON, `path` is its text without the first slash and with
    U+FFFD for such bytes, and `path_b64` (base64) is there exactly when that lost something."""

    def __init__(self, *, always: bool = False) -> None:
        """`always`: `path_b64` is there in any case, null if nothing was lost."""
        self._always = always

    def encode(self, _: str, path: str | None) -> Json:
        if path is None:
            return {"path": None}
        raw = path.encode(errors="surrogateescape")[1:]
        text = raw.decode(errors="replace")
        lossy = text.encode() != raw
        encoded = base64.b64encode(raw).decode() if lossy else None
        return {"path": text, **({"path_b64": encoded} if lossy or self._always else {})}

    def decode(self, _: str, data: Json) -> str | None:
        if data["path"] is None:
            return None
        raw = base64.b64decode(data["path_b64"]) if data.get("path_b64") is not None else str(data["path"]).encode()
        return "/" + raw.decode(errors="surrogateescape")

    def describe(self, _: str, schema: Json) -> Json:
        text = {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Path B64"}
        return {
            "path": schema,
            "path_b64": {**text, "description": "Its bytes in base64, where the text has lost one."},
        }


class _RelativePath(_Path):
    """The bytes of a path below a directory. Its JSON is that of a sandbox path."""

    def encode(self, name: str, path: Any) -> Json:
        return super().encode(name, "/" + path.decode(errors="surrogateescape"))

    def decode(self, name: str, data: Json) -> Any:
        path = super().decode(name, data)
        return None if path is None else path[1:].encode(errors="surrogateescape")


class _Base64:
    """Bytes, in JSON as base64 in the member NAME_b64. `text`: the client has them as text with lone surrogates."""

    def __init__(self, *, text: bool) -> None:
        self._text = text

    def encode(self, name: str, value: Any) -> Json:
        raw = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        return {f"{name}_b64": None if raw is None else base64.b64encode(raw).decode()}

    def decode(self, name: str, data: Json) -> Any:
        text = data[f"{name}_b64"]
        raw = None if text is None else base64.b64decode(text)
        return raw.decode(errors="surrogateescape") if self._text and raw is not None else raw

    def describe(self, name: str, schema: Json) -> Json:
        return {
            f"{name}_b64": {**schema, "anyOf": [{"type": "string"}, {"type": "null"}], "title": f"{name.title()} B64"}
        }


SandboxPath = Annotated[str, _Path()]
FullPath = Annotated[str, _Path(always=True)]
"""The same with a `path_b64` in any case, which is null if `path` says all."""
RelativePath = Annotated[bytes, _RelativePath()]
Base64Bytes = Annotated[bytes, _Base64(text=False)]
Base64Text = Annotated[str, _Base64(text=True)]


class ApiRecord:
    """A dataclass that is made from the API's JSON, and turned into it, by the types of its fields. Members that it does
    not know are ignored, so that a daemon may say more than its client knows."""

    __slots__ = ()
    __match_args__: ClassVar[Any] = _MatchArgs()
    __pydantic_config__: ClassVar[Json] = {"json_schema_serialization_defaults_required": True}

    @classmethod
    def of(cls, data: Json) -> Self:
        """From the members of `data`. A record that no other one is the base of becomes no dataclass by this: most are
        only read."""
        values = {}
        decoders = _decoders(cls)  # type: ignore[arg-type]
        for name, decoder in decoders.items():
            if isinstance(decoder, _Path | _Base64):
                values[name] = decoder.decode(name, data)
            elif name in data:
                values[name] = data[name] if decoder is None else decoder(data[name])
        if len(values) < len(decoders) or not (cls._made or ApiRecord in cls.__bases__):  # type: ignore[attr-defined]
            return cls(**values)
        made = object.__new__(cls)
        vars(made).update(values)
        return made


def _complete(name: str) -> Callable[..., Any]:
    """The method of records that are no dataclass yet. The dataclass has its own."""

    def method(self: Any, *args: Any) -> Any:
        _ = type(self).__dataclass_fields__
        return getattr(type(self), name)(self, *args)

    return method


for _name in ("__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"):
    setattr(ApiRecord, _name, _complete(_name))


class Request(ApiRecord):
    """The base of what is sent to the daemon, which refuses members that it does not know, and a text or a truth value in
    the place of a number."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Json] = {"extra": "forbid"}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Json]) -> Json:
        strict: Json = _strict(handler(source))
        return strict


def _strict(schema: Any) -> Any:
    """A pydantic schema that takes numbers and truth values as JSON has them."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {"strict": True} if schema.get("type") in ("int", "float", "bool") else {}
    return {key: _strict(item) for key, item in schema.items()} | strict


def encode(value: Any) -> Json:
    """The JSON of a record, as a dictionary in which other records may stand: `json.dumps` takes this as `default`."""
    if not isinstance(value, ApiRecord):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    members = vars(value)
    if _is_plain(type(value)):  # type: ignore[arg-type]
        return members
    forms = forms_of(type(value))  # type: ignore[arg-type]
    encoded: Json = {}
    for name, member in members.items():
        if name in forms:
            encoded |= forms[name].encode(name, member)
        elif member is not UNSET:
            encoded[name] = member
    return encoded


def encode_masked(value: Any) -> Json:
    """The same with stars in place of secrets."""
    hidden = _hidden(type(value))  # type: ignore[arg-type]
    return {name: _mask(member) if name in hidden else member for name, member in encode(value).items()}


def encode_given(value: Any) -> Json:
    """The same without the fields that have their defaults: what its sender asked for. A field that a later version adds
    changes nothing here, so a digest of this knows a request again after an update."""
    return without_defaults(value, encode_masked(value))


def without_defaults(value: Any, members: Json) -> Json:
    """`members`, without those that are fields of the dataclass `value` and have their defaults there."""
    defaults = _defaults(type(value))  # type: ignore[arg-type]
    return {
        name: member
        for name, member in members.items()
        if name not in defaults or getattr(value, name) != defaults[name]()
    }


def _mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mask(item) for key, item in value.items()}
    return "**********" if value else value


def decode(kind: Any, data: Any) -> Any:
    """The value of this type, a record or made of some, from its JSON."""
    make = _maker_of(kind)
    return data if make is None else make(data)


@cache
def _maker_of(kind: Any) -> _Make | None:
    return _maker(kind)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _fields(cls: Any) -> Any:
    from dataclasses import fields  # once a record is used

    return fields(cls)


def types_of(cls: Any) -> dict[str, Any]:
    """The types of a record's fields, with their bounds."""
    hints: dict[str, Any] = _hints(cls)
    return hints


def is_secret(cls: Any, name: str) -> bool:
    """The field is recorded nowhere in plain."""
    return name in _hidden(cls)


@cache
def _defaults(cls: Hashable) -> dict[str, Callable[[], Any]]:
    """A function for each field that need not be given, which makes its default."""
    from dataclasses import MISSING

    found: dict[str, Callable[[], Any]] = {}
    for item in _fields(cls):
        if item.default_factory is not MISSING:
            found[item.name] = item.default_factory
        elif item.default is not MISSING:
            found[item.name] = partial(_itself, item.default)
    return found


def _itself(value: A) -> A:
    return value


@cache
def _decoders(cls: Any) -> dict[str, _Make | _Path | _Base64 | None]:
    forms = forms_of(cls)
    return {name: forms.get(name) or _maker(hint) for name, hint in _hints(cls).items()}


@cache
def forms_of(cls: Hashable) -> dict[str, _Path | _Base64]:
    """The fields that the JSON has in another form."""
    found = {name: _marker(hint, (_Path, _Base64)) for name, hint in _hints(cls).items()}
    return {name: form for name, form in found.items() if form is not None}


@cache
def records_in(cls: Hashable) -> frozenset[str]:
    """The fields that are records, or have some."""
    return frozenset(name for name, hint in _hints(cls).items() if _has_record(hint))


def _has_record(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, ApiRecord)) or any(map(_has_record, get_args(hint)))


@cache
def _is_plain(cls: Any) -> bool:
    """Its JSON has its fields as they are."""
    factories = (item.default_factory for item in _fields(cls))
    return not forms_of(cls) and not any(factory is _unset for factory in factories)


@cache
def _hidden(cls: Hashable) -> frozenset[str]:
    return frozenset(name for name, hint in _hints(cls).items() if _marker(hint, (_Hidden,)) is not None)


def _marker(hint: Any, kinds: tuple[type, ...]) -> Any:
    """The marker of one of these kinds in an annotation."""
    if get_origin(hint) is Annotated:
        found = next((item for item in hint.__metadata__ if isinstance(item, kinds)), None)
        return found or _marker(hint.__origin__, kinds)
    return next((marker for arg in get_args(hint) if (marker := _marker(arg, kinds)) is not None), None)


def _maker(hint: Any) -> _Make | None:
    """Return the function that makes a field of this type from its JSON; None if the JSON itself is the field."""
    made = next(filter(None, map(_maker, get_args(hint))), None)
    if get_origin(hint) is tuple:
        return tuple if made is None else lambda values: tuple(map(made, values))
    if get_origin(hint) is list:
        return None if made is None else lambda values: list(map(made, values))
    if get_origin(hint) in (UnionType, Union):
        return None if made is None else lambda value: None if value is None else made(value)
    return hint.of if isinstance(hint, type) and issubclass(hint, ApiRecord) else made
