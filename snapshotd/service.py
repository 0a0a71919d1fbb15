"""Services of a sandbox: commands that are started again wherever a sandbox begins on files that declare them.

The declarations are a file of the sandbox, so that each snapshot has those of its moment, and a fork, a rewind, an export
and a merge of files need to know nothing of them. Its form is TOML (docs/services.md). A sandbox can write it, so what is
read is checked like any request.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.errors import LimitExceeded, SnapshotdError, UsageError
from snapshotd.terms import (
    ID_FORM,
    NAME_PATTERN,
    READY_TIMEOUT_MAX_S,
    READY_TIMEOUT_S,
    RESTARTS_MAX,
    SERVICES_MAX_BYTES,
    nearest,
    number_of,
)

PLACE = b"etc/snapshotd/services.toml"
"""Path of the file in a sandbox."""
SERVICES_MAX = 16
"""Services of one sandbox. Each costs what a command in the background does: two threads and up to five descriptors."""
DOTS_MAX = 1000
"""Dots in one line of the file: the time to read a key grows with the square of those in it."""
_NUMBER_MAX = 1 << 31
_KEYS = ("command", "cwd", "env", "user", "ready", "ready_timeout", "port", "required", "restarts")


@dataclass(frozen=True, slots=True)
class DeclaredService:
    """A declared service. `ready`: a shell's command line whose success says that the service is ready; `port`: a TCP
    port on which it listens then; without both it is ready once it is started. `required`: where it does not
    come back, the sandbox does not start. `restarts`: how often it is started again in one sandbox after it has ended
    by itself."""

    name: str
    argv: tuple[str, ...]
    cwd: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    user: str | None = None
    ready: str | None = None
    ready_timeout_s: float = READY_TIMEOUT_S
    port: int | None = None
    required: bool = False
    restarts: int = 0

    def with_texts(self, change: Callable[[str], str]) -> DeclaredService:
        """A copy whose command, environment and check have gone through `change`."""
        return replace(
            self,
            argv=tuple(map(change, self.argv)),
            env=tuple((name, change(value)) for name, value in self.env),
            ready=None if self.ready is None else change(self.ready),
        )


def parse(text: str, source: str) -> tuple[DeclaredService, ...]:
    """The services that a file declares, in its order. `source` names the file in the UsageError; LimitExceeded."""
    check_size(text, source)
    try:
        return _services(tomllib.loads(text), source)
    except SnapshotdError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as exc:
        raise UsageError(f"{source} cannot be read as TOML: {str(exc)[:200]}") from exc


def _services(tables: dict[str, Any], source: str) -> tuple[DeclaredService, ...]:
    other = next((key for key in tables if key != "services"), None)
    if other is not None:
        raise UsageError(f"{source} has the key {other[:80]!r}; it has tables [services.NAME] only")
    declared = tables.get("services", {})
    if not isinstance(declared, dict):
        raise UsageError(f"{source}: services is no table; write [services.NAME]")
    if len(declared) > SERVICES_MAX:
        raise LimitExceeded(f"{source} declares {number_of(len(declared), 'service')}; {SERVICES_MAX} are the most")
    return tuple(_service(name, table, source) for name, table in declared.items())


def check_size(text: str, source: str) -> None:
    """LimitExceeded: the file would be too large. UsageError: it is no text."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as exc:
        raise UsageError(f"{source} has text that is not Unicode (at character {exc.start}); leave that out") from None
    if size > SERVICES_MAX_BYTES:
        raise LimitExceeded(
            f"{source} has {size} bytes; {SERVICES_MAX_BYTES} are the most for the services of a sandbox"
        )
    if any(line.count(".") > DOTS_MAX for line in text.split("\n")):
        raise LimitExceeded(f"{source} has a line with more than {DOTS_MAX} dots; put what is so long into a script")


def write(services: Sequence[DeclaredService]) -> str:
    """The text of a file that declares these services. `parse` reads it back."""
    return "\n".join(_table(service) for service in services)


def check(service: DeclaredService) -> DeclaredService:
    """The service, if it can be one. UsageError."""
    check_name(service.name)
    what = f"the service {service.name}"
    texts = [*service.argv, *(part for pair in service.env for part in pair), service.cwd, service.user, service.ready]
    if not service.argv or not service.argv[0]:
        raise UsageError(f"{what} has no command; name the program that it is")
    if any("\0" in text for text in texts if text is not None):
        raise UsageError(f"{what} has a zero byte in its command or environment, which no process can have")
    if any(not name or "=" in name for name, _ in service.env):
        raise UsageError(f"{what} has a variable whose name is empty or has `=`")
    if service.ready is not None and not service.ready.strip():
        raise UsageError(f"{what} has an empty ready command; leave it out")
    if not 0 < service.ready_timeout_s <= READY_TIMEOUT_MAX_S:
        raise UsageError(f"{what} has {READY_TIMEOUT_MAX_S:g} seconds at most to get ready, and more than none")
    if service.port is not None and not 1 <= service.port <= 65535:
        raise UsageError(f"{what} has the port {service.port}; ports are from 1 to 65535")
    if not 0 <= service.restarts <= RESTARTS_MAX:
        raise UsageError(f"{what} can be started again 0 to {RESTARTS_MAX} times")
    return service


def check_name(name: str) -> None:
    """UsageError: the text cannot be the name of a service."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot be the name of a service: use up to 64 letters, digits and ._- , starting with a letter or digit"
        )
    if ID_FORM.fullmatch(name) or name.isdecimal():
        raise UsageError(
            f"the name {name} of a service could be taken for the id of a command, or for a port: choose one with another letter"
        )


def _service(name: str, table: Any, source: str) -> DeclaredService:
    try:
        check_name(name)
    except UsageError as exc:
        raise UsageError(f"{source}: {exc.message}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{source}: {name!r} is no table; write [services.NAME] with a command")
    unknown = next((key for key in table if key not in _KEYS), None)
    if unknown is not None:
        raise UsageError(f"{source}: the service {name} has the key {unknown[:80]!r}{nearest(unknown[:80], _KEYS)}")
    command, env = table.get("command"), table.get("env", {})
    argv: Any = ("/bin/sh", "-c", command) if isinstance(command, str) and command else command
    if not _is_list_of_text(argv):
        raise UsageError(f"{source}: the service {name} needs a command, a text for the shell or a list of texts")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise UsageError(f"{source}: the env of the service {name} is no table of texts")
    _check_kinds(name, table, source)
    made = DeclaredService(
        name,
        tuple(argv),
        table.get("cwd"),
        tuple(env.items()),
        table.get("user"),
        table.get("ready"),
        float(table.get("ready_timeout", READY_TIMEOUT_S)),
        table.get("port"),
        table.get("required", False),
        table.get("restarts", 0),
    )
    try:
        return check(made)
    except UsageError as exc:
        raise UsageError(f"{source}: {exc.message}") from None


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, str) for one in value)


def _check_kinds(name: str, table: dict[str, Any], source: str) -> None:
    kinds: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
        (("cwd", "user", "ready"), (str,), "a text"),
        (("ready_timeout",), (int, float), "a number"),
        (("port", "restarts"), (int,), "a whole number"),
        (("required",), (bool,), "true or false"),
    )
    for keys, allowed, shown in kinds:
        for key in keys:
            value = table.get(key)
            wrong = not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
            if value is not None and wrong:
                raise UsageError(f"{source}: {key} of the service {name} is {shown}")
            if isinstance(value, int) and abs(value) > _NUMBER_MAX:
                raise UsageError(f"{source}: {key} of the service {name} is too large a number")


def _table(service: DeclaredService) -> str:
    lines = [f"[services.{_text(service.name)}]", f"command = [{', '.join(map(_text, service.argv))}]"]
    if service.env:
        lines.append(f"env = {{ {', '.join(f'{_text(name)} = {_text(value)}' for name, value in service.env)} }}")
    for key, value in (("cwd", service.cwd), ("user", service.user), ("ready", service.ready)):
        if value is not None:
            lines.append(f"{key} = {_text(value)}")
    if service.ready_timeout_s != READY_TIMEOUT_S:
        lines.append(f"ready_timeout = {service.ready_timeout_s!r}")
    if service.port is not None:
        lines.append(f"port = {service.port}")
    if service.required:
        lines.append("required = true")
    if service.restarts:
        lines.append(f"restarts = {service.restarts}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """A text of JSON is one of TOML, but for DEL and the half characters that `check_size` finds."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
