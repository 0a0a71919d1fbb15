"""The agreement between client and daemon: the API's version, its headers and the places of its files. Standard library
only.

`API_VERSION` is `major.minor`. Both sides send it in every request and answer; they must be equal, because the CLI and
the daemon come from one package and a daemon that outlived an upgrade is better replaced than half understood.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotd.errors import NotFound, UsageError

if TYPE_CHECKING:
    from snapshotd.config import UserPlaces

API_VERSION = "1.4"
VERSION_HEADER = "X-Snapshotd-Version"
API_PREFIX = "/v1"
KEY_HEADER = "Idempotency-Key"
"""Names a request that makes something. Under one key it is made once: a client that has lost the answer asks again."""
RECALL_HEADER = "X-Snapshotd-Recall"
"""With it the daemon answers from what an earlier request under the key has made, and makes nothing."""

LISTEN_PORT = 7676
"""TCP port of a daemon that listens for other machines, by default."""
SOCKET_PATH_MAX_BYTES = 107
"""sockaddr_un has 108 bytes for the path and its closing zero (unix(7))."""
BODY_MAX_BYTES = 8 << 20
"""Largest request body. Linux allows about 2 MiB of arguments to a program; as JSON, escaped, they can grow
fourfold."""
WITH_FILES = ("/score", "/experiments")
"""Paths of the requests whose bodies bring files with them, as base64 ..."""
WITH_FILES_MAX_BYTES = 32 << 20
"""... and may be larger."""
FILES_MAX_BYTES = 16 << 20
"""Largest folder that a scorer brings, as a tar."""
STDIN_WINDOW_BYTES = 256 << 10
"""Bytes of a command's standard input that may be on their way; the daemon reports further bytes that the command has
taken."""
TIMEOUT_MAX_S = 366 * 86400.0
"""The longest timeout of a command."""
PORT_CONNECTIONS_MAX = 256
"""Most connections to ports in sandboxes, of all clients together."""
PORT_CONNECTIONS_SHARE = 64
"""Most of one tenant's."""
FORK_MAX = 256
"""Most sandboxes one fork may start."""
PARALLEL_MAX = 256
"""Most branches of an experiment at once."""
QUEUE_MAX = 10_000
"""Most children of a fork that is made piece by piece."""
REPEAT_MAX = 10_000
"""Most runs of each snapshot that is scored."""
TTL_MAX_S = 100 * 366 * 86400
"""The longest life of a value, and of a question to a person."""
OUTPUT_MAX = 1 << 53
"""Most bytes of an output that a part can begin at, or have."""
LOG_MAX = 1 << 31
"""Most snapshots a log can be asked for by number; without a number it gives all."""

PROVIDER_URLS = {
    "openai": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
}
"""Model providers that a sandbox can be given, and where their own APIs are."""
PREVIEW_FILES = 1000
"""Number of changed files that a preview or an approval lists, by default."""
LIST_MAX = 1_000_000
"""The most they list."""

LINES = "application/x-ndjson"
"""Media type of what is one JSON object per line."""
TEXT = "text/plain"
BYTES = "application/octet-stream"
FRAMES = "application/vnd.snapshotd.frames"
"""Media type of an answer that mixes raw bytes and events. It is a sequence of frames: one byte for its kind, the
length of its content (32 bits, big endian), the content. The last frame is an event, `result` or `error`; without one
the answer is not whole."""
FRAME_HEADER = struct.Struct(">BI")
FRAME_DATA = 0
FRAME_EVENT = 1
"""A JSON object with the member `event`, as in the answers that are one JSON object per line."""
FRAME_MAX_BYTES = 1 << 20
"""Largest content of a frame."""

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(?:@[0-9]{1,10})?")


def body_max_bytes(path: str) -> int:
    """Largest body of a request to a path below the API's prefix, uploads apart."""
    return WITH_FILES_MAX_BYTES if path in WITH_FILES else BODY_MAX_BYTES


def socket_path_of(state_dir: Path) -> Path:
    """Path of the socket of a state directory's daemon, by default."""
    from snapshotd.config import places  # not where the client is only imported: it makes dataclasses

    return places().socket_of(state_dir)


def hook_socket_of(state_dir: Path, of: UserPlaces | None = None) -> Path:
    """Path of the socket on which a state directory's daemon hears of agents in users' folders. It is the same after a
    restart of the machine: settings of agents name it. `of`: the daemon's places; None: root's daemon hears every user if
    it has such a socket, else the user's own does."""
    from hashlib import sha256  # only then: it loads OpenSSL

    from snapshotd.config import OF_ROOT, places

    name = f"hooks-{sha256(os.fsencode(state_dir.absolute())).hexdigest()[:12]}.sock"
    for_all = OF_ROOT.sockets / name
    if of is None and for_all.exists():
        return for_all
    return (of or places()).sockets / name


def lock_path_of(state_dir: Path) -> Path:
    """The file that the one daemon of a state directory holds locked; its text is that daemon's process id."""
    return state_dir / "lock"


def log_path_of(state_dir: Path) -> Path:
    """Path of a daemon's log, one JSON object per line, unless it runs with --foreground."""
    return state_dir / "daemon.log"


def check_socket_path(path: Path) -> None:
    """UsageError when the kernel cannot bind or connect a socket at `path`."""
    length = len(bytes(path))
    if length > SOCKET_PATH_MAX_BYTES:
        raise UsageError(
            f"the socket path {path} has {length} bytes, but the kernel allows {SOCKET_PATH_MAX_BYTES}; "
            "choose a shorter one, in SNAPSHOTD_SOCKET for instance"
        )


def check_ref(ref: str, what: str = "snapshot or trajectory") -> str:
    """`ref` if it could be an id, a name or a tag. NotFound for anything else: no such thing can exist."""
    if not isinstance(ref, str) or not _REF.fullmatch(ref):
        raise NotFound(
            f"there is no {what} {ref!r}: ids, names and tags are letters, digits and ._- ; `snapshotd tree` shows them"
        )
    return ref


def sandbox_path(path_b64: str) -> bytes:
    """The bytes of a path, without leading slashes. UsageError for a text that cannot be a path."""
    try:
        path = base64.b64decode(path_b64, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError(f"the path is not base64 ({exc}); encode the path's bytes") from exc
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b"\0" in path or b".." in parts:
        raise UsageError(
            f"{os.fsdecode(path)!r} cannot be a path in a snapshot: it has a zero byte or `..`; write it from the sandbox's root"
        )
    return b"/".join(parts)
