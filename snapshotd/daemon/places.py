"""The places that a daemon has beside its state directory: root's, of the machine, or an ordinary user's own."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from snapshotd.config import passed_on
from snapshotd.errors import NotPermitted

_USER_VARIABLES = ("HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
_ROOT_MODE, _USER_MODE = 0o711, 0o700


@dataclass(frozen=True, slots=True)
class UserPlaces:
    """`state_dir`: unless another is named. `run_root`: sockets and other short-lived files of all instances. `share_root`:
    what sandboxes see read-only; it is not in `run_root`, which is often mounted noexec, nor in the state directory, which
    only its owner may search."""

    state_dir: Path
    run_root: Path
    share_root: Path
    mode: int = _ROOT_MODE
    """The mode of `run_root`. Root's is searched by everyone, since the root user of a container may be an unprivileged id."""

    def make_run_root(self) -> Path:
        """`run_root`, made where missing. NotPermitted: it is another user's, or open to others."""
        self.run_root.mkdir(mode=self.mode, parents=True, exist_ok=True)
        found = self.run_root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise NotPermitted(
                f"{self.run_root} belongs to another user; set XDG_RUNTIME_DIR to a directory of your own"
            )
        self.run_root.chmod(self.mode)
        return self.run_root


def find() -> UserPlaces:
    """The places of this process's user. Source: XDG Base Directory Specification; where there is no directory of a login
    session, one among the temporary files."""
    uid, environ = os.geteuid(), passed_on(_USER_VARIABLES)
    if uid == 0:
        return UserPlaces(Path("/var/lib/snapshotd"), Path("/run/snapshotd"), Path("/var/lib/snapshotd-share"))
    home = environ.get("HOME") or os.path.expanduser("~")
    state = Path(environ.get("XDG_STATE_HOME") or Path(home, ".local", "state"))
    runtime = environ.get("XDG_RUNTIME_DIR")
    run_root = Path(runtime, "snapshotd") if runtime else Path(tempfile.gettempdir(), f"snapshotd-{uid}")
    return UserPlaces(state / "snapshotd", run_root, state / "snapshotd-share", _USER_MODE)
