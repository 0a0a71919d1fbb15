"""An ordinary user of the machine, who may make no namespaces and no mounts, with a home of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.support import Snap

UID = 60_000 + os.getpid() % 5_000
"""Another one in each process of the tests, whose users' processes are told apart by it."""
_CHECKOUT = Path(__file__).resolve().parents[1]
_SEEN = r"""
set -e
mount -t tmpfs -o mode=755 none /mnt
for place in $1; do mkdir -p "/mnt/$place"; mount --bind "$place" "/mnt/$place"; done
for closed in $2; do mount -t tmpfs -o mode=755 none "$closed"; done
for place in $1; do mkdir -p "$place"; mount --bind "/mnt/$place" "$place"; done
echo ready
read -r end || true
"""
_WITHOUT_NAMESPACES = r"""
import ctypes, os, struct, sys
def statement(code, k, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, k)
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
refused = {"x86_64": (272, 308, 165), "aarch64": (97, 268, 40)}[os.uname().machine]  # unshare, setns, mount
program = statement(LOAD, 0)
for left, number in zip(range(len(refused), 0, -1), refused):
    program += statement(EQUAL, number, left, 0)
program += statement(RETURN, 0x7FFF0000) + statement(RETURN, 0x00050001)  # allow; EPERM
buffer = ctypes.create_string_buffer(program, len(program))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
filter = Program(len(program) // 8, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(filter)) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


class Ordinary(Snap):
    """The command line as that user runs it, with the default places of one. `close` ends what it needs, not its
    daemon."""

    timeout_s = 100

    def __init__(self, folder: Path, **env: str) -> None:
        """`folder`: an empty one that the user can reach."""
        self.folder, self.home, runtime = folder, folder / "home", folder / "run"
        for directory in (self.home, runtime):
            directory.mkdir(mode=0o700)
            os.chown(directory, UID, UID)
        super().__init__(self.home / ".local/state/snapshotd")
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        self.env = {"PATH": path, "HOME": str(self.home), "XDG_RUNTIME_DIR": str(runtime), "LANG": "C.UTF-8", **env}
        needed = {str(_CHECKOUT), sys.prefix, sys.base_prefix}
        closed = {
            str(parent) for place in needed for parent in Path(place).parents if not parent.stat().st_mode & 0o001
        }
        self._sight = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _SEEN, "sh", " ".join(sorted(needed)), " ".join(sorted(closed))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._sight.stdout is not None
        assert self._sight.stdout.readline() == "ready\n"

    def command(self, *words: str | Path) -> list[str]:
        """A command line that runs another one as the user."""
        own = [
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            "--clear-groups",
            "--bounding-set=-all",
            "--inh-caps=-all",
        ]
        inner = [sys.executable, "-c", _WITHOUT_NAMESPACES, *map(str, words)]
        return ["nsenter", f"--mount=/proc/{self._sight.pid}/ns/mnt", f"--wd={self.home}", *own, *inner]

    def program(self, *args: str | Path) -> list[str]:
        """The same for a command of snapshotd."""
        return self.command(sys.executable, "-m", "snapshotd", *args)

    def __call__(self, *args: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        result = self._run(self.program(*args))
        if code is not None:
            assert result.returncode == code, (args, result.returncode, result.stdout[-3000:], result.stderr[-3000:])
        return result

    def user(self, script: str) -> str:
        """The output of a shell script of the user's."""
        result = self._run(self.command("/bin/sh", "-c", script))
        assert result.returncode == 0, result.stderr
        return result.stdout

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.timeout_s,
            check=False,
        )

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.program(*args),
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def write(self, name: str, text: str) -> Path:
        """A file in the user's home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for made in (path, *path.parents):
            if made == self.home:
                break
            os.chown(made, UID, UID)
        return path

    def processes(self) -> list[tuple[int, str]]:
        """What runs as the user, and has not ended."""
        found: list[tuple[int, str]] = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                if os.stat(f"/proc/{entry}").st_uid == UID and state not in "ZX":
                    found.append((int(entry), Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")))
            except OSError:
                continue  # it has ended
        return found

    def close(self) -> None:
        """What the user sees of the machine goes."""
        with self._sight:
            assert self._sight.stdin is not None
            self._sight.stdin.close()
        shutil.rmtree(self.folder)

    def listing(self, trajectory: str, script: str) -> Any:
        """The output of a shell command as a tool call."""
        return self.sh(trajectory, script)["stdout"]
