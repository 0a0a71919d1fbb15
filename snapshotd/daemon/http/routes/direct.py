"""Handlers of the operations whose row names the service that answers them: they give its method what the request has, and no
more. The first paragraph of the method's docstring describes the operation."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Annotated, Any, get_args, get_type_hints

from fastapi import Path as PathParameter
from fastapi import Query

from snapshotd.api.operation import Operation
from snapshotd.api.operations import OPERATIONS
from snapshotd.api.record import About, types_of
from snapshotd.api.wire import BYTES, sandbox_path
from snapshotd.catalog.base import present_tenant
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.routes.shared import (
    CommandRef,
    NamedDep,
    OpenerDep,
    PathB64,
    Ref,
    ServiceDep,
    handles,
    step_once,
)
from snapshotd.engine.base import Opener
from snapshotd.engine.engine import Engine
from snapshotd.terms import NAME_PATTERN

Experiment = Annotated[str, PathParameter(pattern=f"^{NAME_PATTERN.pattern}$", description="The experiment's name.")]
_PLACES: dict[str, Any] = {"{ref}": Ref, "{command}": CommandRef, "{experiment}": Experiment}
_SERVICES = get_type_hints(Engine)


def _register(operation: Operation[Any], by: str) -> None:
    """Names in the path become the method's first arguments. It takes the body, or the query, as the record that the operation
    names, or fields of the body by their names. Its other arguments stand in the query, but for an `Opener`. A path of a
    sandbox, in the body or in the query, is called NAME_b64."""
    service_name, _, method_name = by.partition(".")
    method = getattr(_SERVICES[service_name], method_name or operation.name)
    types = get_type_hints(method, include_extras=True)
    _, *parameters = inspect.signature(method).parameters.values()
    forms = re.findall(r"\{[^}]+\}", operation.path)
    places = [form[1:-1].removesuffix(":path") for form in forms]
    taken = [_argument("service", ServiceDep)]
    for form, place, parameter in zip(forms, places, parameters, strict=False):
        taken.append(_argument(place, _PLACES.get(form, types[parameter.name])))
    fields: set[str] = set()
    if isinstance(operation.body, type):
        taken.append(_argument("body", operation.body))
        fields = set(types_of(operation.body))
    whole = {
        parameter.name: name
        for name, record in (("body", operation.body), ("query", operation.query))
        for parameter in parameters
        if record is not None and record in (types[parameter.name], *get_args(types[parameter.name]))
    }
    if "query" in whole.values():
        taken.append(_argument("query", operation.query))
    if operation.once:
        taken.append(_argument("named", NamedDep))
    paths = {f"{name}_b64": name for name, kind in types.items() if kind is bytes}
    for parameter in parameters[len(places) :]:
        name, kind = parameter.name, types[parameter.name]
        if name in whole:
            continue
        if kind is Opener:
            taken.append(_argument(name, OpenerDep))
        elif kind is bytes and f"{name}_b64" not in fields:
            taken.append(_argument(f"{name}_b64", PathB64))
        elif kind is not bytes and name not in fields:
            taken.append(_argument(name, _in_query(kind), parameter.default))

    def call(service: Any, given: dict[str, Any]) -> Any:
        at = [given.pop(name) for name in places]
        records = {name: given.pop(record) for name, record in whole.items()}
        if (body := given.pop("body", None)) is not None:
            given |= vars(body)
        options = {
            paths.get(name, name): sandbox_path(value) if name in paths else value for name, value in given.items()
        }
        return partial(getattr(getattr(service.engine, service_name), method.__name__), *at, **records, **options)

    def handle(**given: Any) -> Any:
        service, body, named = given.pop("service"), given.get("body"), given.pop("named", None)
        answer = call(service, given)
        if named is not None:
            return step_once(service, named, body, answer)
        return _seen(service, answer()) if operation.own else answer()

    async def stream(**given: Any) -> Any:
        service = given.pop("service")
        return await streams.octets(service.streams, call(service, given))

    handler: Any = stream if operation.answer == BYTES else handle
    handler.__name__ = operation.name
    handler.__signature__ = inspect.Signature(taken)
    handler.__annotations__ = {argument.name: argument.annotation for argument in taken}
    handles(operation, about=(inspect.getdoc(method) or "").partition("\n\n")[0])(handler)


def _argument(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _in_query(kind: Any) -> Any:
    """The type of an argument, with its description where it has one."""
    told = next((item.text for item in getattr(kind, "__metadata__", ()) if isinstance(item, About)), None)
    return kind if told is None else Annotated[kind, Query(description=told)]


def _seen(service: Any, items: list[Any]) -> list[Any]:
    """The items of a list whose trajectories the caller sees."""
    tenant = present_tenant()
    if tenant is None:
        return items
    seen = service.engine.snapshots.of_tenant(tenant)
    return [item for item in items if _trajectory_of(item) in seen]


def _trajectory_of(item: Any) -> str:
    line: Any = getattr(item, "trajectory", item)
    return line if isinstance(line, str) else line.id


for _operation in OPERATIONS.values():
    if _operation.by is not None:
        _register(_operation, _operation.by)
