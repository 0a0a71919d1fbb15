"""The files that a new trajectory starts with: one layer with the workspace and the agent's program, over its
dependencies, over the image."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from snapshotd.api.trajectories import RunAgentRequest, SandboxFields
from snapshotd.errors import NotFound, UsageError
from snapshotd.formats import ingest
from snapshotd.kernel import files
from snapshotd.kernel.namespaces import as_seen_by
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress
from snapshotd.service import PLACE
from snapshotd.trees.base import Entry
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import AgentSpec, Kind, LayerID, Stack

WORKSPACE = b"workspace"
AGENT_DIR = b"agent"
PYTHON = "python3"


def build(
    store: LayerStore,
    below: Stack,
    sandbox: SandboxFields,
    agent: Path | None,
    namespace_pid: int,
    directories: tuple[bytes, ...] = (),
) -> LayerID | None:
    """A sealed layer with the copied workspace and agent file, the declarations of services, and `directories` of the
    root, or None if there is nothing of that. The caller unpins it.

    UsageError or NotFound name the host path that cannot be taken; nothing is left behind.
    """
    outside = agent is not None and _inside(agent, sandbox, namespace_pid) is None
    if sandbox.workspace is None and sandbox.services is None and not outside and not directories:
        return None
    with store.making() as layer:
        dress(store, layer, below)
        with _upper(store, layer) as root:
            for name in directories:
                os.mkdir(name, dir_fd=root)
            if sandbox.workspace is not None:
                with files.closing_fd(files.make_dirs(root, WORKSPACE)) as target:
                    ingest.ingest_folder(Path(sandbox.workspace), target, namespace_pid)
            if agent is not None and outside:
                with files.closing_fd(files.make_dirs(root, AGENT_DIR)) as target:
                    _copy_agent(agent, target, namespace_pid)
            if sandbox.services is not None:
                _write_services(root, sandbox.services)
        store.drop_work(layer)
    return layer


def _write_services(root: int, text: str) -> None:
    directory, name = os.path.split(PLACE)
    with files.closing_fd(files.make_dirs(root, directory)) as target:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o644, dir_fd=target), "wb") as file:
            file.write(text.encode())


def digest(store: LayerStore, below: Stack, layer: LayerID | None, services: str = "") -> str:
    """A digest of the files that a run begins with, over its image, as 64 hexadecimal characters. It covers the layers
    with its dependencies, the declarations of `services`, and the workspace: content, owners, permissions and attributes,
    but no times. A program's file outside of the workspace is not covered. Cost: reads the workspace."""
    found = hashlib.sha256(json.dumps([*below.layers, *filter(None, [services])]).encode())
    if layer is None:
        return found.hexdigest()
    with files.closing_fd(store.read_upper(layer)) as fd:
        with StackView([fd]) as view:
            if any(name == WORKSPACE for name, _ in view.list(b"")):
                for path, entry in view.walk(WORKSPACE):
                    found.update(_describe(view, path, entry))
        return found.hexdigest()


def _describe(view: View, path: bytes, entry: Entry) -> bytes:
    content = b""
    if entry.kind is Kind.SYMLINK:
        content = view.readlink(path)
    elif entry.kind is Kind.FILE:
        with open(view.open(path), "rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
    xattrs = [(name.hex(), value.hex()) for name, value in sorted(view.xattrs(path).items())]
    facts = (path.hex(), entry.kind, entry.mode, entry.uid, entry.gid, entry.rdev, content.hex(), xattrs)
    return json.dumps(facts).encode()


@contextmanager
def _upper(store: LayerStore, layer: LayerID) -> Iterator[int]:
    with files.closing_fd(store.read_upper(layer)) as fd:
        times = os.fstat(fd)
        yield fd
        os.utime(fd, ns=(times.st_atime_ns, times.st_mtime_ns))  # the root itself did not change


def _copy_agent(agent: Path, directory: int, namespace_pid: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with (
        files.closing_fd(open_agent(agent, namespace_pid)) as source,
        files.closing_fd(os.open(os.fsencode(agent.name), flags, 0o644, dir_fd=directory)) as target,
    ):
        files.copy_data(source, target, os.fstat(source).st_size)


def open_agent(agent: Path, namespace_pid: int) -> int:
    """Open an agent's file for reading. NotFound or UsageError, naming it."""
    try:
        fd = open_seen(agent, namespace_pid)
    except FileNotFoundError as exc:
        raise NotFound(
            f"agent file {str(agent)!r} does not exist; give the path of a Python file, or a command to run in the sandbox"
        ) from exc
    except OSError as exc:
        raise UsageError(f"agent file {str(agent)!r} cannot be read: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(
            f"agent file {str(agent)!r} is not a regular file; give the path of a Python file, or a command to run in the sandbox"
        )
    return fd


def open_seen(path: Path, namespace_pid: int) -> int:
    """Open a file of the machine for reading, by the path that the client knows it by. OSError."""
    return as_seen_by(namespace_pid, lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def _inside(agent: Path, sandbox: SandboxFields, namespace_pid: int) -> PurePosixPath | None:
    """Place of the agent's file in the workspace; None if it lies elsewhere."""
    if sandbox.workspace is None:
        return None
    workspace = Path(sandbox.workspace)
    file, folder = as_seen_by(namespace_pid, lambda: (agent.resolve(), workspace.resolve()))
    try:
        return PurePosixPath(file.relative_to(folder))
    except ValueError:
        return None


def agent_spec(request: RunAgentRequest, namespace_pid: int, *, isolated: bool) -> AgentSpec:
    """The program of a run as it is called inside the sandbox, without isolation from the workspace.
    A file of the workspace is run there, so that its
    imports work."""
    if request.agent is None:
        return AgentSpec(argv=request.command, program=0, user=request.user)
    agent = Path(request.agent)
    inside = _inside(agent, request, namespace_pid)
    if isolated:
        path = f"/workspace/{inside}" if inside is not None else f"/agent/{agent.name}"
    else:
        path = str(inside) if inside is not None else f"../agent/{agent.name}"
    return AgentSpec(argv=(PYTHON, path, *request.args), program=2, user=request.user)
