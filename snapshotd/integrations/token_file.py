"""A secret of a server of ours, in a file that only its user reads."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from snapshotd.errors import NotPermitted, UsageError

_LEAST = 20


def _any() -> str:
    return secrets.token_urlsafe(32)


def token_of(path: Path, make: Callable[[], str] = _any) -> str:
    """The token in a file. One that is not there is made, with what `make` returns. NotPermitted: others may read it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _known_token(path)
    except OSError as exc:
        raise UsageError(f"the token file {path} cannot be made: {exc.strerror}; name another token file") from exc
    token = make()
    with open(fd, "w") as file:
        file.write(f"{token}\n")
    return token


def _known_token(path: Path) -> str:
    try:
        with open(path) as file:
            found = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"the token file {path} cannot be read ({exc}); name another token file") from exc
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise NotPermitted(
            f"the token file {path} is open to other users; `chmod 600` a file of your own, or name another token file"
        )
    if len(token) < _LEAST or not token.isascii() or not token.isprintable():
        raise UsageError(f"{path} holds no token of {_LEAST} characters or more; remove it, and one is made")
    return token
