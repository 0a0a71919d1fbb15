"""The real server over the fake engine, as a process: `python fake_daemon.py STATE_DIR SOCKET [READY_FD]`. Needs no root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from snapshotd.daemon.server import ServerOptions, serve_here
from snapshotd.errors import SnapshotdError


def main() -> int:
    state_dir, socket_path = Path(sys.argv[1]), Path(sys.argv[2])
    ready_fd = int(sys.argv[3]) if len(sys.argv) > 3 else None
    try:
        return serve_here(ServerOptions(state_dir, socket_path, ready_fd=ready_fd), lambda _: FakeEngine())
    except SnapshotdError as error:
        sys.stderr.write(f"{error.code}: {error.message}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
