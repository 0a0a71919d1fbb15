"""The real server over the fake engine, as a process: `python fake_daemon.py STATE_DIR SOCKET [READY_FD]`. Needs no
root.

In the environment: SMALL_SANDBOXED takes every peer for a sandboxed one, SMALL_FAILURE is what the engine says when it is
opened, SMALL_EXIT dies without a word.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from snapshotd.daemon.server import ServerOptions, serve_here, told_to
from snapshotd.errors import SnapshotdError, Unsupported

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.unit.daemon.fake_engine import FakeEngine


def open_engine(_state_dir: Path) -> FakeEngine:
    if "SMALL_FAILURE" in os.environ:
        raise Unsupported(os.environ["SMALL_FAILURE"])
    return FakeEngine()


def main() -> int:
    state_dir, socket_path = Path(sys.argv[1]), Path(sys.argv[2])
    ready_fd = int(sys.argv[3]) if len(sys.argv) > 3 else None
    options = ServerOptions(state_dir, socket_path, ready_fd=ready_fd)
    if "SMALL_SANDBOXED" in os.environ:
        options = dataclasses.replace(options, is_sandboxed=lambda pid: True)
    if "SMALL_EXIT" in os.environ:
        return 3
    try:
        with told_to(ready_fd):
            return serve_here(options, open_engine)
    except SnapshotdError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
