"""Handlers of the operations whose row names the service that answers them: they give its method what the request has, and no
more. The first paragraph of the method's docstring describes the operation."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any, get_type_hints

from snapshotd.api.operations import OPERATIONS, Operation
from snapshotd.api.record import types_of
from snapshotd.api.trajectories import NetworkRequest
from snapshotd.daemon.http.decoding import check_hosts
from snapshotd.daemon.http.routes.shared import CommandRef, NamedDep, OpenerDep, Ref, ServiceDep, handles, step_once
from snapshotd.engine.base import Opener
from snapshotd.engine.engine import Engine

_PLACES: dict[str, Any] = {"ref": Ref, "command": CommandRef}
_SERVICES = get_type_hints(Engine)


def _register(operation: Operation[Any], service_name: str) -> None:
    """Names in the path become the method's first arguments, and fields of the body those of the same names. Its other
    arguments stand in the query, but for an `Opener`."""
    method = getattr(_SERVICES[service_name], operation.name)
    types, (_, *parameters) = get_type_hints(method), inspect.signature(method).parameters.values()
    places = re.findall(r"\{(\w+)\}", operation.path)
    taken = [_argument("service", ServiceDep), *(_argument(name, _PLACES[name]) for name in places)]
    fields: set[str] = set()
    if isinstance(operation.body, type):
        taken.append(_argument("body", operation.body))
        fields = set(types_of(operation.body))
    if operation.once:
        taken.append(_argument("named", NamedDep))
    for parameter in parameters[len(places) :]:
        if types[parameter.name] is Opener:
            taken.append(_argument(parameter.name, OpenerDep))
        elif parameter.name not in fields:
            taken.append(_argument(parameter.name, types[parameter.name], parameter.default))

    def handle(**given: Any) -> Any:
        service, body, named = given.pop("service"), given.pop("body", None), given.pop("named", None)
        at = [given.pop(name) for name in places]
        options = given if body is None else given | vars(body)
        if isinstance(body, NetworkRequest):
            check_hosts((*body.allow, *(body.only or ())))
        answer = partial(getattr(getattr(service.engine, service_name), operation.name), *at, **options)
        return answer() if named is None else step_once(service, named, body, answer)

    handle.__name__ = operation.name
    handle.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    handle.__annotations__ = {argument.name: argument.annotation for argument in taken}
    handles(operation, about=(inspect.getdoc(method) or "").partition("\n\n")[0])(handle)


def _argument(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


for _operation in OPERATIONS.values():
    if _operation.by is not None:
        _register(_operation, _operation.by)
