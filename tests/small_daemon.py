"""The real daemon over the smallest runtime, as a process: `python small_daemon.py STATE_DIR SOCKET [READY_FD]`. Its
sandboxes are plain folders, and all that it keeps lies beside its socket, so it needs no root. Commands find the
programs of tests/programs. A command `crash` is a defect of the engine, a command `full` finds the disk full, and the
file `broken` of a workspace cannot be read to its end.

In the environment: SMALL_PORTS has a sandbox's ports be those of this machine, where a plain folder has none;
SMALL_LISTEN is where it listens for other machines;
SMALL_LEASE is how long the lease of a node of a fleet lasts, how often it is renewed, and the margin, in milliseconds;
SMALL_MERGE_S is the time between two looks at what other nodes have stored;
SMALL_CLOCK is a file: the daemon's clock is so many seconds ahead (and SMALL_OFF more), as far as garbage goes;
SMALL_AHEAD has the clock of the fleet's database be as far ahead as its table `ahead` says;
SMALL_REFUSING refuses what would read or write any folder of this machine, as it is told;
SMALL_SANDBOXED takes every peer for a sandboxed one, SMALL_FAILURE is what the engine says when it is
opened, SMALL_EXIT dies without a word.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snapshotd.api.commands import ExecRequest
from snapshotd.catalog import tenancy
from snapshotd.config import UserPlaces, read
from snapshotd.daemon.access.address import parse_listen
from snapshotd.daemon.host import Footing
from snapshotd.daemon.server import ServerOptions, serve
from snapshotd.daemon.wiring import open_engine
from snapshotd.engine.base import ExecResult
from snapshotd.engine.engine import Engine
from snapshotd.engine.runs import ports
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.storage import archiver
from snapshotd.errors import SnapshotdError, Unsupported, UsageError
from snapshotd.kernel import abilities
from snapshotd.kernel.abilities import Mode
from snapshotd.types import NO_ISOLATION

PROGRAMS = Path(__file__).with_name("programs")


def open_small(state_dir: Path, footing: Footing) -> Engine:
    if "SMALL_FAILURE" in os.environ:
        raise Unsupported(os.environ["SMALL_FAILURE"])
    if "SMALL_PORTS" in os.environ:
        _open_ports()
    if "SMALL_LEASE" in os.environ:
        from snapshotd.daemon import joining  # few are nodes
        from snapshotd.engine.node import pinning, publisher
        from snapshotd.fleet.base import LeaseTerms
        from snapshotd.fleet.tables import CLOCK, FleetTables

        ttl, renew, margin = (int(text) * 1_000_000 for text in os.environ["SMALL_LEASE"].split())
        pinning.LOOK_S = renew / 1e9
        publisher.MERGE_S = float(os.environ.get("SMALL_MERGE_S", publisher.MERGE_S))
        if "SMALL_AHEAD" in os.environ:
            joining.FleetTables = partial(FleetTables, clock=f"({CLOCK} + (SELECT ns FROM public.ahead))")
        joining.LeaseTerms = lambda: LeaseTerms(ttl, renew, margin)
    if "SMALL_CLOCK" in os.environ:
        ahead = Path(os.environ["SMALL_CLOCK"])
        off = float(os.environ.get("SMALL_OFF", "0"))
        archiver.time = SimpleNamespace(time=lambda: time.time() + float(ahead.read_text()) + off)
    abilities.loop_devices = lambda: "a file system of their own is not for small layers"
    os.environ["PATH"] = f"{PROGRAMS}:{os.environ['PATH']}"
    tenancy._OWNED = tenancy._OWNED.replace(f", '{NO_ISOLATION}'", "")  # here the folders stand for isolated sandboxes
    engine = open_engine(dataclasses.replace(read(), state_dir=str(state_dir)), footing)
    _put_defects(engine)
    return engine


class _WithPorts:
    """A sandbox that takes connections."""

    isolated = True

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


def _open_ports() -> None:
    connect = ports.connect
    ports.in_network_namespace = lambda _, action: action()
    ports.connect = lambda sandbox, *told: connect(sandbox and _WithPorts(sandbox), *told)


def _refuse(*_: Any, **__: Any) -> Any:
    raise UsageError("this daemon touches no folder of this machine")


def _put_defects(engine: Engine) -> None:
    execute, cat = engine.runs.exec, engine.snapshots.cat

    def execute_or_fail(ref: str, request: ExecRequest, **told: Any) -> ExecResult:
        if request.argv[0] == "crash":
            raise ZeroDivisionError("a defect")
        if request.argv[0] == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        return execute(ref, request, **told)

    def cat_to_the_middle(ref: str, path: bytes) -> Iterator[bytes]:
        if path == b"workspace/broken":
            yield b"begin"
            raise ZeroDivisionError("in the middle")
        yield from cat(ref, path)

    engine.runs.exec, engine.snapshots.cat = execute_or_fail, cat_to_the_middle
    if "SMALL_REFUSING" in os.environ:
        for service, name in (
            (engine.runs, "create"),
            (engine.runs, "run"),
            (engine.images, "build"),
            (engine.images, "import_"),
            (engine.storage, "mount"),
            (engine.storage, "unmount"),
            (engine.snapshots, "restore"),
        ):
            assert callable(getattr(service, name))
            setattr(service, name, _refuse)


def main() -> int:
    state_dir, socket_path = Path(sys.argv[1]), Path(sys.argv[2])
    ready_fd = int(sys.argv[3]) if len(sys.argv) > 3 else None
    beside = socket_path.parent
    places = UserPlaces(state_dir, beside, beside / "run", beside / "share")
    footing = Footing(places, Mode.FOLDER)
    sandboxed = (lambda pid: True) if "SMALL_SANDBOXED" in os.environ else None
    listen = parse_listen(os.environ["SMALL_LISTEN"]) if "SMALL_LISTEN" in os.environ else None
    options = ServerOptions(
        state_dir, socket_path, ready_fd=ready_fd, footing=footing, is_sandboxed=sandboxed, listen=listen
    )
    if "SMALL_EXIT" in os.environ:
        return 3
    try:
        return serve(options, lambda ground: open_small(state_dir, ground))
    except SnapshotdError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
