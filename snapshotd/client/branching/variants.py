"""Variants of a fork: the keywords in which a child may differ, and their form for the daemon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshotd.api.wire import FORK_MAX
from snapshotd.client.local.arguments import wrong
from snapshotd.client.local.sizes import LIMITS, limit_fields
from snapshotd.client.verbs.history import edit_fields
from snapshotd.errors import UsageError
from snapshotd.terms import nearest, number_of

EDITS = ("files", "messages", "drop_messages", "add_messages", "result", "state")
KEYWORDS = ("name", "args", "env", "secrets", "model", "network", *LIMITS, *EDITS)

_MEANT = {"message": "add_messages", "file": "files", "secret": "secrets"}
"""Keys of a table of variants (`variant_tables.py`) that another keyword stands for here."""

Variants = Mapping[str, Mapping[str, Any]]
"""The label of each child, and the keywords in which it differs (`Snapshotd.fork`)."""


def check_variants(variants: Variants, most: int = FORK_MAX) -> None:
    """UsageError: there are none, too many, or one has a keyword that no variant has."""
    if not isinstance(variants, Mapping):
        raise wrong("variants", variants, "a mapping of labels to keywords")
    for label, given in variants.items():
        if not isinstance(given, Mapping):
            raise wrong(f"variants[{label!r}]", given, "a mapping of keywords")
    if not 1 <= len(variants) <= most:
        raise UsageError(
            f"one fork makes 1 to {most} children, not {number_of(len(variants), 'variant')}; nothing was started"
        )
    for label, given in variants.items():
        for key in given:
            if key not in KEYWORDS:
                meant = f"; did you mean {_MEANT[key]!r}?" if key in _MEANT else nearest(key, KEYWORDS)
                raise UsageError(f"the variant {label} has an unknown key {key!r}{meant}")


def variant_fields(variants: Variants, most: int = FORK_MAX) -> list[dict[str, Any]]:
    """The variants as the API takes them. UsageError as `check_variants`, and for text that is no amount."""
    check_variants(variants, most)
    return [_fields(label, given) for label, given in variants.items()]


def _fields(label: str, given: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in given.items() if key not in (*LIMITS, *EDITS)}
    if "args" in plain and plain["args"] is not None:
        plain["args"] = list(plain["args"])
    limits = limit_fields(given)
    edit = {key: given[key] for key in EDITS if key in given}
    return {
        "label": label,
        **plain,
        **({"limits": limits} if limits else {}),
        **({"edit": edit_fields(**edit)} if edit else {}),
    }
