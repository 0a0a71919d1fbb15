"""Configured secrets: values that the owner named, and the forms in which programs print them."""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Iterator, Mapping

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.secrets.needles import Needles
from snapshotd.types import NAME_PATTERN

MIN_VALUE_BYTES = 6
"""Shorter values stand in too many texts that have nothing to do with them."""
MAX_VALUES = 256
MAX_TOTAL_BYTES = 32 << 10
"""Limit for all values of a trajectory together. At the limit, searching for all their forms takes about 80 MB of
memory (300 MB if they are nothing but characters that are escaped everywhere); ten API keys take 0.2 MB."""
_GO_JSON = {ord(char): f"\\u{ord(char):04x}" for char in "&<>\u2028\u2029"}


class Configured:
    """The configured secrets of one trajectory, in all forms. Immutable."""

    def __init__(self, values: Mapping[str, str]) -> None:
        """`values`: name to value. UsageError for a name that is none, and for a value that is too short or not Unicode
        text; LimitExceeded for more than `MAX_VALUES` values or `MAX_TOTAL_BYTES` in all."""
        if len(values) > MAX_VALUES:
            raise LimitExceeded(
                f"{len(values)} secrets are configured, and {MAX_VALUES} is the most: leave out those that are not secret"
            )
        total = sum(len(value) for value in values.values())
        if total > MAX_TOTAL_BYTES:
            raise LimitExceeded(
                f"the configured secrets have {total} characters, and {MAX_TOTAL_BYTES} is the most: leave out the longest"
            )
        self.names = frozenset(values)
        self._name_of: dict[bytes, str] = {}
        for name, value in values.items():
            for form in _forms(_check(name, value)):
                self._name_of.setdefault(form, name)
        self.needles = Needles(self._name_of)

    def name(self, value: bytes) -> str:
        """The name of a secret that one of the forms belongs to."""
        return self._name_of[value]


def _check(name: str, value: str) -> bytes:
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot name a secret: use letters, digits, '_', '.' and '-', beginning with a letter or digit, 64 at most"
        )
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the secret {name} is not Unicode text, so it cannot be found in output: give it as UTF-8"
        ) from None
    if len(data) < MIN_VALUE_BYTES:
        raise UsageError(
            f"the secret {name} has {len(data)} bytes and {MIN_VALUE_BYTES} is the least that can be told from ordinary text: leave it out"
        )
    return data


def _forms(value: bytes) -> Iterator[bytes]:
    """The value as it is, as a terminal prints its lines, in JSON (and in JSON within JSON), in URLs, in hexadecimal
    and in base64.

    JSON and URLs as Python writes them, and where that is something else, as Go and JavaScript do.
    """
    for plain in dict.fromkeys((value, value.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))):
        string = plain.decode()
        yield plain
        yield plain.hex().encode()
        yield plain.hex().upper().encode()
        yield from _base64_forms(plain)
        for ascii_only in (True, False):
            once = json.dumps(string, ensure_ascii=ascii_only)[1:-1]
            for form in (once,) if ascii_only else (once, once.translate(_GO_JSON)):
                yield form.encode()
                yield json.dumps(form, ensure_ascii=ascii_only)[1:-1].encode()
        for quoted in _url_forms(string):
            yield quoted.encode()
            yield _lower_escapes(quoted).encode()


def _url_forms(string: str) -> tuple[str, ...]:
    form = urllib.parse.quote_plus(string, safe="*")
    return (
        urllib.parse.quote(string),
        urllib.parse.quote(string, safe=""),
        urllib.parse.quote(string, safe="!'()*"),  # encodeURIComponent
        urllib.parse.quote_plus(string),
        form,
        form.replace("~", "%7E"),  # URLSearchParams
    )


def _lower_escapes(quoted: str) -> str:
    """%2F as %2f."""
    first, *rest = quoted.split("%")
    return first + "".join("%" + part[:2].lower() + part[2:] for part in rest)


def _base64_forms(value: bytes) -> Iterator[bytes]:
    """The text that base64 of any text with the value in it contains: for each of three places where the value can
    begin, the characters that depend on it alone. Up to two characters beside them hold a few of its bits."""
    for offset in range(3):
        for alphabet in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = alphabet(bytes(offset) + value)
            first = -(-offset * 8 // 6)
            last = (offset + len(value)) * 8 // 6
            yield encoded[first:last]
