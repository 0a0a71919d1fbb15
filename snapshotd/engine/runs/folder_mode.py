"""Sandboxes without isolation: what their commands find around them, and what cannot be honest there and is refused.

The folder of a sandbox stands for `/` of its snapshots. Its commands are processes of the machine with the daemon's
rights: they see the machine's programs, files and network. docs/folder-mode.md is the user's side.
"""

from __future__ import annotations

import posixpath

from snapshotd.api.trajectories import SandboxFields
from snapshotd.config import read_variables
from snapshotd.engine.base import Variant
from snapshotd.errors import Unsupported
from snapshotd.runtime.base import DEFAULT_PATH, SOCKET_PATH
from snapshotd.types import NO_ISOLATION, Network, SandboxSpec

HOME, TEMPORARY = b"home", b"tmp"
DIRECTORIES = (b"workspace", HOME, TEMPORARY)
"""Directories that every folder begins with."""


def environment(root: str) -> dict[str, str]:
    """The environment of every command in the folder `root`, before the request's own."""
    return {
        "PATH": DEFAULT_PATH,
        **read_variables(["PATH"]),
        "HOME": f"{root}/{HOME.decode()}",
        "TMPDIR": f"{root}/{TEMPORARY.decode()}",
        "SNAPSHOTD_AGENT_SOCKET": SOCKET_PATH,
    }


def place(root: str, path: str) -> str:
    """The path on this machine of the file that a sandbox in the folder `root` calls `path`."""
    return f"{root}{posixpath.normpath('/' + path.lstrip('/'))}"


def refusal(what: str, instead: str) -> Unsupported:
    """The error for a part of a request that a folder cannot have. `instead`: what the user can do."""
    return Unsupported(f"{what} needs a sandbox with isolation, and this one is a plain folder: {instead}")


def check(request: SandboxFields) -> None:
    """Check that a folder can keep every part of the request. Unsupported."""
    if request.image != SandboxFields().image:
        raise refusal("an image", "leave it out; commands find this machine's programs")
    if request.network is not None:
        raise refusal(f"the network {request.network}", "leave it out; commands have this machine's network")
    if request.limits.given:
        raise refusal("a limit of memory, processors, processes or disk", "leave it out; commands have this machine's")
    if request.providers:
        raise refusal("the recording gateway", "leave the provider out, and give the agent its key with --env")
    if request.program is not None:
        raise refusal(
            "a known agent's program", "install it here, and run it as a command: `run --isolation none -- CMD`"
        )


def check_variant(spec: SandboxSpec, one: Variant) -> None:
    """Check that a folder can keep every part of a fork's child. Unsupported."""
    if spec.runtime != NO_ISOLATION:
        return
    if one.network is not None:
        raise refusal(f"the network {one.network}", "leave it out; commands have this machine's network")
    if one.limits:
        raise refusal("a limit", "leave it out; commands have what this machine has")


def no_requirements() -> Unsupported:
    """The error for Python packages of an agent."""
    return refusal(
        "a set of Python packages of its own",
        "install them into the Python that runs the agent, and leave out --requirements or the header in its file",
    )


NETWORK = Network.HOST
"""The network of every sandbox without isolation."""
