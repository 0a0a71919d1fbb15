"""Types of the API for the page's scripts: `python -m snapshotd.page.api_types < docs/openapi.json` prints
static/records.d.ts, which `make lint` checks the scripts with. A browser never asks for it."""

from __future__ import annotations

import json
import sys
from typing import Any

_SCALARS = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def declare_types(description: dict[str, Any]) -> str:
    """The text of a namespace `Api` with one interface for each record of an OpenAPI description."""
    schemas = description["components"]["schemas"]
    lines = ["// Made by `make docs` from docs/openapi.json.", "", "declare namespace Api {"]
    for name, schema in sorted(schemas.items()):
        if "properties" not in schema:
            lines += [f"  type {name} = {_type(schema)};", ""]
            continue
        required = schema.get("required", ())
        lines.append(f"  interface {name} {{")
        for key, value in schema["properties"].items():
            lines.append(f"    {key}{'' if key in required else '?'}: {_type(value)};")
        lines += ["  }", ""]
    return "\n".join([*lines[:-1], "}", ""])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(_type(one) for one in schema[several])
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return f"[{', '.join(_type(one) for one in schema['prefixItems'])}]"
        return f"({_type(schema.get('items', {}))})[]"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"Record<string, {_type(values) if isinstance(values, dict) else 'unknown'}>"
    return _SCALARS.get(str(kind), "unknown")


if __name__ == "__main__":
    sys.stdout.write(declare_types(json.load(sys.stdin)))
