"""The descriptions of records in docs/openapi.json: the docstrings of their classes and fields."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any

from snapshotd.api.operations import OPERATIONS
from snapshotd.api.record import ApiRecord, forms_of
from snapshotd.api.wire import API_PREFIX


def describe(openapi: dict[str, Any]) -> dict[str, Any]:
    """The description with the docstrings of the records, and with the members that they have in JSON only."""
    for row in OPERATIONS.values():
        if row.query is not None:
            about = docstrings(row.query)
            for parameter in openapi["paths"][API_PREFIX + row.path][row.method.lower()]["parameters"]:
                if (said := about.get(parameter["name"])) is not None:
                    parameter["description"] = parameter["schema"]["description"] = said
    records = find_records(ApiRecord)
    for name, schema in openapi["components"]["schemas"].items():
        if (record := records.get(name.removesuffix("-Input").removesuffix("-Output"))) is not None:
            _describe(record, schema)
    return openapi


def find_records(base: type[ApiRecord]) -> dict[str, type[ApiRecord]]:
    """Name to record, of all that are built on `base` and imported."""
    found = {cls.__name__: cls for cls in base.__subclasses__()}
    return found | {name: cls for direct in base.__subclasses__() for name, cls in find_records(direct).items()}


def _describe(record: Any, schema: dict[str, Any]) -> None:
    about, forms = docstrings(record), forms_of(record)
    if "" in about:
        schema["description"] = about[""]
    properties: dict[str, Any] = {}
    for name, member in schema["properties"].items():
        described = {**member, **({"description": about[name]} if name in about else {})}
        properties |= forms[name].describe(name, described) if name in forms else {name: described}
    schema["properties"] = properties
    if "required" in schema:
        schema["required"] = [name if name in properties else f"{name}_b64" for name in schema["required"]]


def docstrings(record: type[ApiRecord]) -> dict[str, str]:
    """Name of a field to its docstring, also of the record's bases; the record's own has the name ""."""
    found: dict[str, str] = {}
    for cls in reversed(record.__mro__):
        if issubclass(cls, ApiRecord):
            found |= _read_docstrings(cls.__module__).get(cls.__name__, {})
    if "" in found and "" not in _read_docstrings(record.__module__)[record.__name__]:
        del found[""]
    return {name: " ".join(text.split()) for name, text in found.items()}


@cache
def _read_docstrings(module: str) -> dict[str, dict[str, str]]:
    classes = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            docs = {
                field.target.id: text.value.value
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
            own = ast.get_docstring(node)
            classes[node.name] = docs | ({"": own} if own else {})
    return classes
