"""A secret of a server of ours, in a file that only its user reads."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from snapshotd.errors import NotPermitted, UsageError

_LEAST, _FILE_MAX = 20, 1 << 20


def token_of(path: Path) -> str:
    """The token in a file, which is made if it is missing. UsageError: the file has no token, or several. NotPermitted: other
    users may read it."""
    (token, *more), *others = tokens_of(path, lambda: secrets.token_urlsafe(32))
    if more or others:
        raise UsageError(f"{path} has to hold one token; remove it, and one is made")
    return token


def tokens_of(path: Path, make: Callable[[], str]) -> list[list[str]]:
    """The lines of a file of tokens, each as its words; the first word is a token. A missing file is made, with the token
    that `make` returns. Errors: as `token_of`."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read_tokens(path)
    except OSError as exc:
        raise UsageError(f"the token file {path} cannot be made: {exc.strerror}; name another token file") from exc
    token = make()
    with open(fd, "w") as file:
        file.write(f"{token}\n")
    return [[token]]


def _read_tokens(path: Path) -> list[list[str]]:
    try:
        with open(path) as file:
            found = os.fstat(file.fileno())
            lines = [line.split() for line in file.read(_FILE_MAX).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"the token file {path} cannot be read ({exc}); name another token file") from exc
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
        raise NotPermitted(
            f"the token file {path} is open to other users; `chmod 600` a file of your own, or name another token file"
        )
    if not lines or not all(len(line[0]) >= _LEAST and line[0].isascii() and line[0].isprintable() for line in lines):
        raise UsageError(f"{path} holds no token of {_LEAST} characters or more; remove it, and one is made")
    return lines
