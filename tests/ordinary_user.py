"""An ordinary user of this machine who runs snapshotd, made for one test: in the databases of a mount namespace of its own,
with a range of further user ids or without."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RANGE_IDS = 65_536
_numbers = itertools.count()
_DATABASES = ("passwd", "group", "subuid", "subgid")
_ENTER = """
for name in passwd group subuid subgid; do mount --bind "$DATABASES/$name" "/etc/$name"; done
%s
exec %s setpriv --reuid "$ID" --regid "$ID" --clear-groups env -i "$@"
"""


def interpreter() -> str:
    """A Python of this version that every user can run."""
    for program in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        real = Path(program).resolve()
        if real.exists() and all(part.stat().st_mode & stat.S_IXOTH for part in (real, *real.parents)):
            return str(real)
    pytest.skip(f"no Python 3.{sys.version_info.minor} that every user can run")


class OrdinaryUser:
    """See the module's text. `host`: what root does in the mount namespace before the user's command, as shell text.
    `chroot`: the root directory of the command."""

    def __init__(self, home: Path, number: int, *, ids: bool, host: str = "", chroot: str = "") -> None:
        self.home, self.id, self.ids = home, 100_000 + number, ids
        self.first = 1_900_000_000 + number * RANGE_IDS
        """The first id of the range, which is the root of sandboxes as the host sees it."""
        self.state_dir = home / ".local/state/snapshotd"
        self.runtime_dir = home / "runtime"
        self._enter = _ENTER % (host, f"chroot {chroot}" if chroot else "")
        self._databases = home.parent / f"{home.name}-etc"
        self._databases.mkdir()
        user, line = f"sd{self.id}", f"sd{self.id}:x:{self.id}:"
        more = {
            "passwd": f"{line}{self.id}::{home}:/bin/sh\n",
            "group": f"{line}\n",
            "subuid": f"{user}:{self.first}:{RANGE_IDS}\n" if ids else "",
            "subgid": f"{user}:{self.first}:{RANGE_IDS}\n" if ids else "",
        }
        for name in _DATABASES:
            here = Path("/etc", name)
            here.touch()  # a mount point
            (self._databases / name).write_text((here.read_text() if name in ("passwd", "group") else "") + more[name])
        for directory in (home, self.runtime_dir):
            directory.mkdir(mode=0o700)
            os.chown(directory, self.id, self.id)
        self.env = {
            "HOME": str(home),
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "XDG_RUNTIME_DIR": str(self.runtime_dir),
            "PYTHONPATH": f"{ROOT}:{sysconfig.get_paths()['purelib']}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, *argv: str | Path, env: dict[str, str] | None = None) -> list[str]:
        """What root runs so that the user runs `argv`."""
        settings = [f"{name}={value}" for name, value in {**self.env, **(env or {})}.items()]
        enter = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "env",
            f"DATABASES={self._databases}",
            f"ID={self.id}",
        ]
        return [*enter, "sh", "-ec", self._enter, "sh", *settings, *map(str, argv)]

    def run(
        self, *argv: str | Path, code: int | None = 0, env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*argv, env=env), capture_output=True, text=True, cwd="/", timeout=timeout, check=False
        )
        if code is not None and done.returncode != code:
            log = self.state_dir / "daemon.log"
            tail = log.read_text()[-3000:] if log.exists() else ""
            raise AssertionError(
                f"{argv} ended with {done.returncode}, not {code}:\n{done.stdout}\n{done.stderr}\n{tail}"
            )
        return done

    def __call__(self, *args: str | Path, code: int | None = 0, env: dict[str, str] | None = None) -> str:
        """A command of snapshotd; what it prints."""
        return self.run(interpreter(), "-m", "snapshotd", *args, code=code, env=env).stdout

    def json(self, *args: str | Path) -> Any:
        return json.loads(self(*args, "--json"))

    def refused(self, *args: str | Path, env: dict[str, str] | None = None) -> str:
        """What a command says that fails."""
        done = self.run(interpreter(), "-m", "snapshotd", *args, code=None, env=env)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def give(self, source: Path, name: str) -> Path:
        """A copy of a file in the user's home."""
        target = self.home / name
        shutil.copyfile(source, target)
        os.chown(target, self.id, self.id)
        return target

    def processes(self) -> dict[int, list[str]]:
        """The user's processes, and those of its sandboxes, that have not ended: number to arguments."""
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                status = Path(f"/proc/{name}/status").read_text()
                arguments = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            owner = int(fields["Uid"].split()[0])
            mine = owner == self.id or self.first <= owner < self.first + RANGE_IDS
            if mine and not fields["State"].startswith(("Z", "X")):
                found[int(name)] = arguments
        return found

    def daemon(self) -> int:
        """The process id of the daemon that serves."""
        return int((self.state_dir / "lock").read_text().split("\n")[0])

    def kill_daemon(self) -> int:
        pid = self.daemon()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in self.processes(), "the daemon has ended")
        return pid

    def nothing_left(self) -> None:
        """No process, no mount on the host, and no file below the runtime directory but empty directories."""
        wait_until(lambda: not self.processes(), f"no process is left: {self.processes()}")
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.home) in line]
        assert mounts == []
        left = [path for path in self.runtime_dir.rglob("*") if not path.is_dir()]
        assert [path for path in left if path.is_socket() or path.name == "state.json"] == []

    def end(self) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.processes(), "all processes are killed")


def wait_until(condition: Any, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


@contextmanager
def ordinary_users(
    count: int = 1, *, ids: Sequence[bool], host: str = "", chroot: str = ""
) -> Iterator[list[OrdinaryUser]]:
    """Users with homes of their own, and nothing of them left afterwards."""
    place = Path(tempfile.mkdtemp(prefix="snapshotd-users-", dir="/var/tmp"))
    place.chmod(0o755)
    users = [  # there may be others at the same time, of this process and of others
        OrdinaryUser(
            place / f"home{number}", (os.getpid() * 20 + next(_numbers)) % 20_000, ids=has, host=host, chroot=chroot
        )
        for number, has in zip(range(count), ids, strict=True)
    ]
    try:
        yield users
    finally:
        for user in users:
            user.end()
        shutil.rmtree(place)
