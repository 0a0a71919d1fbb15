"""Outbound network for one container through slirp4netns: user-mode NAT, no bridge, no host firewall rules, no
addresses of the host.

Inside: tap0 10.0.2.100/24, gateway 10.0.2.2 (the host's own loopback cannot be reached through it), name server
10.0.2.3, which forwards to the host's resolvers. One process per container; it outlives the daemon and is found again
by its process id and start time. It parses the sandbox's packets, so it runs with a seccomp filter, without
capabilities, in an empty root (its own options).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.processes import start_time, wait_readable
from snapshotd.runtime import failure
from snapshotd.runtime._process import kill_and_reap

NAMESERVER = "10.0.2.3"
_PROGRAM = "slirp4netns"
_DEVICE = "tap0"
_HARDENING = ("--enable-sandbox", "--enable-seccomp")
_READY_DEADLINE_S = 60.0


def require() -> str:
    """Path of slirp4netns. Raises Unsupported when it or the tun device is missing."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise Unsupported(
            "network bridge with runc needs slirp4netns, which is missing: `snapshotd setup` installs it, or use network none"
        )
    if not os.path.exists("/dev/net/tun"):
        raise Unsupported(
            "network bridge with runc needs /dev/net/tun: `modprobe tun`, give a container that device, or use network none"
        )
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise Unsupported(
            "network bridge with runc needs /dev/net/tun, which this user may not open: `sudo chmod 666 /dev/net/tun`, or use network none"
        )
    return program


def start(directory: Path, pid: int, *, user_namespace: bool) -> None:
    """Give the network namespace of `pid` an uplink and return when it works. `directory` keeps the process id and the
    log.

    Raises Unsupported, or SandboxFailed with slirp4netns's own words; then no process is left.
    """
    argv = [require(), "--configure", "--mtu=65520", "--disable-host-loopback", "--netns-type=path", *_HARDENING]
    if user_namespace:
        argv.append(f"--userns-path=/proc/{pid}/ns/user")
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    with closing_fd(ready_w):
        argv += [f"--ready-fd={ready_w}", f"/proc/{pid}/ns/net", _DEVICE]
        with open(directory / "slirp.log", "wb") as log:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(ready_w,),
                cwd="/",
                start_new_session=True,
            )
        (directory / "slirp.pid").write_text(f"{child.pid} {start_time(child.pid)}")
    with closing_fd(ready_r):
        if not wait_readable(ready_r, _READY_DEADLINE_S) or os.read(ready_r, 1) != b"1":
            child.kill()
            child.wait()
            reason = failure.shorten((directory / "slirp.log").read_text("utf-8", "replace")) or "it gave no reason"
            raise SandboxFailed(f"the sandbox's network could not be set up by slirp4netns: {reason}")
    # The Popen object has no further use: `stop` works by process id, after a restart of the daemon as well.
    child.returncode = 0


def stop(directory: Path, pid: int | None) -> None:
    """End the container's slirp4netns. Not an error when there is none. `pid` is the container's init, if known."""
    if not (directory / "slirp.log").exists():
        return  # never started
    found = _read_record(directory) or _find_by_command_line(pid)
    if found is not None:
        kill_and_reap(*found)


def _read_record(directory: Path) -> tuple[int, int] | None:
    try:
        pid, started = (directory / "slirp.pid").read_text().split()
        return int(pid), int(started)
    except (FileNotFoundError, ValueError):
        return None  # the daemon died in the moment between start and record


def _find_by_command_line(pid: int | None) -> tuple[int, int] | None:
    argument = f"/proc/{pid}/ns/net".encode()
    for name in os.listdir("/proc") if pid is not None else ():
        try:
            if name.isdigit() and argument in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                return int(name), start_time(int(name))
        except OSError:
            continue  # it has ended meanwhile
    return None
