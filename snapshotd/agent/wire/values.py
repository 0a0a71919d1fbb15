"""Python values as JSON. A value that JSON cannot hold becomes its `repr`; no argument or result of a tool can make
this fail.

`encode` writes compact UTF-8. Lone surrogates (file names that are not UTF-8) become backslash escapes, since the
daemon takes valid Unicode only; NaN and the infinities, and integers beyond 64 bits, become text.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Dict, List

ARGUMENT_LIMIT_BYTES = 64 << 10
"""Bound of one argument's JSON text; a longer one is cut, and its length and SHA-256 follow."""
REQUEST_LIMIT_BYTES = 768 << 10
"""Bound of all arguments of a call together; leaves room below the 1 MiB that the protocol allows for a line."""
DEPTH_LIMIT = 32
"""Deeper nesting becomes text (the daemon refuses more than 64 levels)."""
NODE_LIMIT = 1000000
"""Values visited at most. Containers that share parts can have exponentially many."""
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
COMPLETED = "subprocess.CompletedProcess"
"""Marks the record of one."""


def encode(value: Any) -> bytes:
    """Compact JSON of a value that `plain` returned."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def text_of(value: Any) -> str:
    """`repr(value)`, or a stand-in that names the type when its `repr` fails. The same in every run of a program:
    without addresses, and sets in order, since a replay compares it."""
    try:
        if isinstance(value, (set, frozenset)) and value:
            return clean("{{{}}}".format(", ".join(sorted(_ADDRESS.sub("", repr(item)) for item in list(value)))))
        return clean(_ADDRESS.sub("", repr(value)))
    except Exception as exc:  # noqa: BLE001 - foreign code: a repr may raise anything, and a recording must not break the call
        return "<{} whose repr raised {}>".format(type(value).__name__, type(exc).__name__)


def clean(text: str) -> str:
    """`text` as valid Unicode: a lone surrogate becomes `\\udc80`."""
    text = str.__str__(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def plain(value: Any, node_limit: int = NODE_LIMIT) -> Any:
    """The nearest JSON value: tuples become lists, keys become text, everything foreign becomes its `repr`."""
    return _Converter(node_limit).convert(value, 0)


class _Converter:
    """One conversion: counts the values it visits."""

    def __init__(self, node_limit: int) -> None:
        self.left = node_limit

    def convert(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return clean(value)
        if isinstance(value, int):
            return int(value) if -(1 << 63) <= value < 1 << 63 else text_of(int(value))
        if isinstance(value, float):
            return float(value) if value - value == 0 else text_of(float(value))  # only finite numbers give 0
        if depth >= DEPTH_LIMIT or self.left <= 0:
            return "<{}>".format(type(value).__name__)  # not its repr, which may have exponentially many parts
        if isinstance(value, dict):
            return self._dict(value, depth)
        if isinstance(value, (list, tuple)):
            return [self.convert(item, depth + 1) for item in list(value)]
        if type(value).__module__ == "subprocess" and type(value).__name__ == "CompletedProcess":
            return self._completed(value, depth)
        return text_of(value)

    def _dict(self, value: Dict[Any, Any], depth: int) -> Dict[str, Any]:
        return {_key(key): self.convert(item, depth + 1) for key, item in list(value.items())}

    def _completed(self, value: Any, depth: int) -> Dict[str, Any]:
        """`subprocess.run`'s result: the commonest thing a tool returns, and its output should read as text."""
        fields: Dict[str, Any] = {
            "type": COMPLETED,
            "args": self.convert(value.args, depth + 1),
            "returncode": value.returncode,
        }
        fields.update(outputs(value))
        return fields


def outputs(holder: Any) -> Dict[str, Any]:
    """`stdout` and `stderr` of a result or exception of `subprocess.run`, as text; `bytes` names the streams that were
    bytes, and `base64` also has the ones that are not UTF-8."""
    fields: Dict[str, Any] = {}
    for name in ("stdout", "stderr"):
        output = getattr(holder, name)
        if isinstance(output, bytes):
            fields[name] = output.decode("utf-8", "backslashreplace")
            fields.setdefault("bytes", []).append(name)
            if fields[name].encode("utf-8") != output:
                fields.setdefault("base64", {})[name] = base64.b64encode(output).decode("ascii")
        elif output is not None:
            fields[name] = clean(str(output))
    return fields


def restore_outputs(fields: Dict[str, Any]) -> Dict[str, Any]:
    """`outputs` undone: `stdout` and `stderr` as they were, None where there was none."""
    found: Dict[str, Any] = {"stdout": fields.get("stdout"), "stderr": fields.get("stderr")}
    for name in fields.get("bytes", ()):
        exact = fields.get("base64", {}).get(name)
        found[name] = base64.b64decode(exact) if exact is not None else found[name].encode("utf-8")
    return found


def restore(value: Any) -> Any:
    """A recorded result as the program gets it again: the JSON value, or a result of `subprocess.run`."""
    if isinstance(value, dict) and value.get("type") == COMPLETED and {"args", "returncode"} <= set(value):
        import subprocess  # only programs that use it have such a record

        return subprocess.CompletedProcess(value["args"], value["returncode"], **restore_outputs(value))
    return value


def strict(value: Any) -> Any:
    """A copy of a JSON value; tuples become lists and keys text, as in any JSON. TypeError or ValueError for everything
    else."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text.encode("utf-8")  # a lone surrogate is no Unicode: UnicodeEncodeError, a ValueError
    return json.loads(text)


def label(what: str, text: Any) -> str:
    """`text`, if it has 1 to 200 printable characters; else ValueError, which names `what`."""
    if not isinstance(text, str) or not 1 <= len(clean(text)) <= 200 or not clean(text).isprintable():
        raise ValueError("{} has 1 to 200 printable characters; {!r} does not.".format(what, text))
    return clean(text)


def _key(key: Any) -> str:
    return clean(key) if isinstance(key, str) else text_of(key)


def bound(text: str, limit_bytes: int) -> str:
    """`text`, or its beginning and a note of its length and SHA-256 when its UTF-8 form is longer than
    `limit_bytes`."""
    data = text.encode("utf-8")
    if len(data) <= limit_bytes:
        return text
    import hashlib  # costs milliseconds to import and is rarely needed

    head = data[: max(limit_bytes - 128, 0)].decode("utf-8", "ignore")
    return "{}... [cut: {} bytes, sha256 {}]".format(head, len(data), hashlib.sha256(data).hexdigest())


def arguments(
    values: Dict[str, Any], limit_bytes: int = ARGUMENT_LIMIT_BYTES, together_bytes: int = REQUEST_LIMIT_BYTES
) -> Dict[str, Any]:
    """A call's arguments by name, each bounded, all together small enough for one request."""
    converted = {clean(name): plain(value, min(limit_bytes, NODE_LIMIT)) for name, value in values.items()}
    limit = limit_bytes
    while True:
        bounded = {name: _bound_value(value, limit) for name, value in converted.items()}
        if len(encode(bounded)) <= together_bytes:
            return bounded
        if limit < 256:
            names: List[str] = sorted(bounded)
            return {"arguments": bound(", ".join(names), ARGUMENT_LIMIT_BYTES)}
        limit //= 4


def _bound_value(value: Any, limit_bytes: int) -> Any:
    if isinstance(value, str):
        return bound(value, limit_bytes)
    encoded = encode(value)
    return value if len(encoded) <= limit_bytes else bound(encoded.decode("utf-8"), limit_bytes)
