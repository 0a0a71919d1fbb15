"""The file of logins, `hosts.json` in the user's folder of settings: for each daemon on another machine its token, and the
fingerprint of its certificate or who signed it. It is for its user alone (0600)."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from snapshotd.client.local.part_file import part_file
from snapshotd.config import config_folder
from snapshotd.errors import NotFound, NotPermitted, UsageError


@dataclass(frozen=True, slots=True)
class Login:
    """`pin`: `sha256:` and the digest of the certificate; `ca`: path of the certificates that may have signed it; neither:
    the system's may."""

    token: str | None = None
    pin: str | None = None
    ca: str | None = None

    def __repr__(self) -> str:
        return f"Login(pin={self.pin!r}, ca={self.ca!r})"


def logins_path() -> Path:
    return config_folder() / "hosts.json"


def find_login(place: str) -> Login:
    """The login that is kept for a daemon; an empty one if none is. UsageError, NotPermitted."""
    return _read().get(place, Login())


def save_login(place: str, login: Login) -> None:
    """Keep it, in place of an earlier one."""
    _write({**_read(), place: login})


def remove_login(place: str) -> None:
    """Forget it. NotFound."""
    known = _read()
    if place not in known:
        raise NotFound(f"there is no login for {place}; {logins_path()} has those there are")
    del known[place]
    _write(known)


def _read() -> dict[str, Login]:
    path = logins_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}; change that, or remove it and log in again") from exc
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o077:
            raise NotPermitted(f"{path} has tokens that other users could read or set; run `chmod 600 {path}`")
        data = file.read()
    try:
        return {place: Login(**_texts(kept)) for place, kept in json.loads(data)["hosts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged; remove it, and log in again") from None


def _texts(kept: dict[str, Any]) -> dict[str, str | None]:
    return {name: kept.get(name) for name in ("token", "pin", "ca")}


def _write(logins: dict[str, Login]) -> None:
    path = logins_path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps({"hosts": {place: asdict(one) for place, one in logins.items()}}, indent=2)
    with part_file(path) as write:
        write(text.encode() + b"\n")
