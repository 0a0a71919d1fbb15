#!/usr/bin/env python3
"""runc for an engine that does not hold every capability, or may not raise a limit: what is asked for and cannot be given is left out.

`--privileged` asks for all capabilities there are; where the engine itself lacks one (it runs in a container or on a
trimmed machine), runc refuses: "unable to apply caps: operation not permitted". Podman asks for a million open files. Used as
`dockerd --add-runtime trimmed=<this file>` and `podman --runtime <this file>`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

NAMES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
)
"""In the order of their numbers: linux/capability.h."""


def held() -> set[str]:
    """The capabilities that this process may pass on."""
    status = Path("/proc/self/status").read_text()
    mask = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapBnd:"))
    return {f"CAP_{name}" for number, name in enumerate(NAMES) if mask >> number & 1}


def holds_all() -> bool:
    """Whether nothing would be left out."""
    return len(held()) == len(NAMES)


def trim(path: Path, *, bundle: bool) -> None:
    """Take out of an OCI configuration, or out of the `process` object of one, what is not held."""
    config = json.loads(path.read_text())
    process = config["process"] if bundle else config
    sets = process.get("capabilities") or {}
    for kind, names in sets.items():
        sets[kind] = [name for name in names if name in held()]
    if "rlimits" in process:
        process["rlimits"] = [one for one in process["rlimits"] if _may_have(one["type"], one["hard"])]
    path.write_text(json.dumps(config))


def _may_have(kind: str, hard: int) -> bool:
    """True if this process may have a limit as high as that."""
    own = resource.getrlimit(getattr(resource, kind))[1]
    return own == resource.RLIM_INFINITY or hard <= own


def main(arguments: list[str]) -> None:
    """Become runc, after its input was trimmed."""
    for at, word in enumerate(arguments[:-1]):
        if word == "--bundle" and "create" in arguments:
            trim(Path(arguments[at + 1]) / "config.json", bundle=True)
        if word == "--process" and "exec" in arguments:
            trim(Path(arguments[at + 1]), bundle=False)
    os.execvp("runc", ["runc", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
