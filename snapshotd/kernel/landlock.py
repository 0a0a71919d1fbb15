"""Landlock: a process gives up writing outside of some directories, for itself and for all that it will start.

Reading, running programs and the network are as before. From version 6 on signals reach no process outside either.
Standard library only: the process that starts commands in a folder imports it. Source: Documentation/userspace-api/
landlock.rst; every right beyond version 1 is asked for only where the kernel knows it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from snapshotd.kernel import syscalls as sc

NEEDED = 2
"""Version 1 forbids every rename from one directory to another (Linux 5.13 to 5.18), which programs do not expect."""
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGE_DIRECTORY = sum(1 << bit for bit in range(4, 13))
"""Remove and make entries of every kind."""
_SCOPE_SIGNAL = 1 << 1
_PATH_BENEATH = struct.Struct("=Qi")


def version() -> int:
    """The version that the kernel speaks; 0: none, or it is refused here."""
    try:
        return sc.call("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    except OSError:
        return 0


def confine(writable: Iterable[str]) -> bool:
    """From now on this process writes below the directories `writable` alone, and into files that are there below
    /dev. False, and nothing has changed, where the kernel is not able to it. From the only thread. OSError: a
    directory is missing."""
    known = version()
    if known < NEEDED:
        return False
    into_files = _WRITE_FILE | (_TRUNCATE if known >= 3 else 0)
    rights = into_files | _CHANGE_DIRECTORY | _REFER
    attributes = struct.pack("=Q", rights) if known < 6 else struct.pack("=QQQ", rights, 0, _SCOPE_SIGNAL)
    ruleset = sc.call("landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for path, allowed in (*((path, rights) for path in writable), ("/dev", into_files)):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = ctypes.create_string_buffer(_PATH_BENEATH.pack(allowed, fd), _PATH_BENEATH.size)
                sc.call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, ctypes.byref(rule), 0)
            finally:
                os.close(fd)
        sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        sc.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return True
