"""The parts of `snapshotd.types` that commands and the client need, too: making all its records takes 10 ms, a tenth of
what a short command may take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

SHORT_ID_CHARS = 12
"""Number of characters of an id that people are shown (as docker does)."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""The form of names and tags that are given. It excludes paths, options and control sequences."""
KNOWN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(?:@[1-9][0-9]{0,9})?")
"""The form of names and tags that exist: NAME@UID is of the folders of that user, who is not root, and only hooks give
it."""
ID_FORM = re.compile(r"[0-9a-f]{4,32}")
"""An id, or the beginning of one that may stand for it. It is no name."""

NO_ISOLATION = "none"
"""The runtime of sandboxes that are plain folders, whose commands are processes of the machine (runtime/folder.py)."""

_WHOLE_ID = re.compile(r"[0-9a-f]{32}")

SECONDS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
"""Seconds in a unit of time, as durations are written: 90s, 12h, 7d."""
SECONDS_MOST = 10_000 * 366 * SECONDS["d"]
"""Longest duration in a rule."""

SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
"""The command that a person's shell is: bash, or sh where there is none."""

DEFAULT_TENANT = "default"
"""Tenant of a trajectory, and of the key-value store, if the user names none."""
RESERVED_TENANTS = frozenset(("e2b",))
"""Tenants of programs beside the daemon, whose values are for them alone (integrations/e2b/records.py): no token and no
sandbox has one."""
TENANT_VARIABLE = "SNAPSHOTD_TENANT"
"""Environment name of a trajectory's tenant, if it is not the default. It is part of the recorded environment, so that
resumptions and forks have it too; commands do not see it."""

ALLOW = "allow:"
"""The beginning of a network's text whose rules follow, with commas between them (network.py)."""
MOST_RULES = 256
NETWORK_MAX = MOST_RULES * 264
"""Characters of a network's text."""

SERVICES_MAX_BYTES = 64 << 10
"""Size of the file that declares a sandbox's services (service.py)."""
READY_TIMEOUT_S = 60.0
READY_TIMEOUT_MAX_S = 3600.0
"""Longest time that a service may take to be ready."""
RESTARTS_MAX = 1000
"""Most restarts of a service in one sandbox."""

PRUNE_GRACE_S = 600.0
"""Age from which a prune may touch a pack, by default."""


def short(any_id: str) -> str:
    """The form of an id that tables show; any unique prefix is accepted back."""
    return any_id[:SHORT_ID_CHARS]


def number_of(count: int, noun: str) -> str:
    """`1 file`, `2 files`, `0 directories`. Only the last word of `noun`, as it is for one, is changed."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def duration(seconds: float) -> str:
    """`7d`, `90m`, `30s`: in the largest unit that divides it, days at most."""
    unit = next((unit for unit in "dhm" if seconds % SECONDS[unit] == 0), "s")
    return f"{seconds / SECONDS[unit]:.10g}{unit}"


ARGUMENT_CHARS = 200
"""Most characters of a call's main argument that are shown."""
_SCRIPTS = (["sh", "-c"], ["bash", "-c"], ["/bin/sh", "-c"], ["/bin/bash", "-c"], ["snapshotd-line"])
"""Programs whose one further argument is a script. The last one is that of `shell --each`."""


def nearest(key: str, known: Iterable[str]) -> str:
    """`; did you mean X?` if a known key is like this one, else all that are known."""
    import difflib  # for errors alone

    names = sorted(known)
    close = difflib.get_close_matches(key, names, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def main_argument(arguments: Any) -> str:
    """The part of a call's arguments that tells a person what it did, on one line: a command line, else the first one that
    is text, else all of them as JSON. Not yet safe for a terminal."""
    values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
    text = next(filter(None, map(_as_text, values)), None)
    if text is None:
        text = json.dumps(arguments, ensure_ascii=False) if arguments else ""
    line = " ".join(text[: 4 * ARGUMENT_CHARS].split())
    return line if len(line) <= ARGUMENT_CHARS else line[: ARGUMENT_CHARS - 1] + "…"


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return short(value) if _WHOLE_ID.fullmatch(value) else value
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return None
    import shlex  # the client is imported without it

    return str(value[-1]) if value[:-1] in _SCRIPTS else shlex.join(value)
