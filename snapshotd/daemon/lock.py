"""One daemon per state directory."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from snapshotd.api.wire import lock_path_of
from snapshotd.errors import NO_ROOM, Conflict, NotPermitted, UsageError
from snapshotd.kernel.files import closing_fd

_ANOTHER = "choose another with --state-dir or SNAPSHOTD_STATE_DIR"


def make_state_dir(state_dir: Path) -> None:
    """Create the state directory (0700) and its parents (0755) as far as they are missing.

    NotPermitted when it exists and another user could write into it; UsageError when it is not a directory.
    """
    try:
        state_dir.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        try:
            state_dir.mkdir(mode=0o700)
        except FileExistsError:
            pass  # checked below
        info = state_dir.stat()
    except OSError as exc:
        why = "a directory above it is none" if isinstance(exc, FileExistsError | NotADirectoryError) else exc.strerror
        raise UsageError(
            f"the state directory {state_dir} cannot be made by user {os.geteuid()}: {why}; {_ANOTHER}"
        ) from exc
    if not stat.S_ISDIR(info.st_mode):
        raise UsageError(f"the state directory {state_dir} is not a directory; {_ANOTHER}")
    if info.st_uid not in (0, os.geteuid()):
        raise NotPermitted(
            f"the state directory {state_dir} belongs to user {info.st_uid}, who could write into it; `chown` it to user "
            f"{os.geteuid()}, or {_ANOTHER}"
        )
    if info.st_mode & 0o022:
        raise NotPermitted(
            f"the state directory {state_dir} (mode {stat.S_IMODE(info.st_mode):04o}) can be written by others; "
            f"`chmod 0700 {state_dir}`, or {_ANOTHER}"
        )


class StateLock:
    """The exclusive lock on a state directory, held until `release` or any end of the process."""

    def __init__(self, state_dir: Path) -> None:
        """Take the lock without waiting. Conflict, naming the holder, when another daemon has it."""
        path = lock_path_of(state_dir)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = _holder(self._fd)
            os.close(self._fd)
            raise Conflict(
                f"another daemon (pid {holder or 'unknown'}) already serves the state directory {state_dir}; use that one, stop it with "
                f"`snapshotd daemon --stop --state-dir {state_dir}`, or choose another directory"
            ) from exc
        try:
            self.sign()
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise

    def sign(self, serves_at: Path | None = None) -> None:
        """Write the holder's name into the lock file, and the socket that it serves at, once it does. On a full disk an
        earlier attempt may have failed and left the file empty."""
        line = f"{os.getpid()}\n".encode()
        if serves_at is not None:
            line += os.fsencode(serves_at.absolute()) + b"\n"
        os.pwrite(self._fd, line, 0)  # over the old one: emptied first, the file would need a new block
        os.ftruncate(self._fd, len(line))

    def release(self) -> None:
        os.close(self._fd)


def lock_holder(state_dir: Path) -> int | None:
    """The process id of the daemon that serves a state directory, or None when none does. Needs no daemon that answers.

    NotPermitted when the lock file may not be read; UsageError when there can be none.
    """
    path = lock_path_of(state_dir)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except PermissionError as exc:
        raise NotPermitted(
            f"the lock {path} cannot be read: {exc.strerror}; run the command as the user who runs the daemon (root: with sudo)"
        ) from exc
    except OSError as exc:
        raise UsageError(
            f"the lock {path} cannot be read: {exc.strerror}; name the state directory of a daemon"
        ) from exc
    with closing_fd(fd):
        return _holder_if_locked(fd)


def _holder_if_locked(fd: int) -> int | None:
    deadline = time.monotonic() + 1.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _holder(fd)
            if pid is not None or time.monotonic() > deadline:
                return pid
            time.sleep(0.01)  # the holder is between taking the lock and writing its id
        else:
            return None


def _holder(fd: int) -> int | None:
    text, _, _ = os.pread(fd, 32, 0).partition(b"\n")
    return int(text) if text.isdigit() else None


def lock_socket(state_dir: Path) -> Path | None:
    """The socket at which the holder serves a state directory; None while it does not say."""
    try:
        lines = lock_path_of(state_dir).read_bytes().split(b"\n")
    except OSError:
        return None
    return Path(os.fsdecode(lines[1])) if len(lines) > 2 else None
