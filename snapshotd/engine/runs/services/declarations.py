"""The declarations of services in a sandbox: a file of it (snapshotd/service.py), which its programs can write, too."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from snapshotd import service as service_file
from snapshotd.api.commands import BackgroundRequest
from snapshotd.engine import requests
from snapshotd.engine.context import Context
from snapshotd.engine.sandbox import placing
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.errors import Conflict, LimitExceeded, NotFound, SnapshotdError, UsageError
from snapshotd.kernel import files, turns
from snapshotd.service import PLACE, SERVICES_MAX, DeclaredService
from snapshotd.terms import SERVICES_MAX_BYTES
from snapshotd.types import Snapshot

DECLARED, REMOVED = "service", "removed"
"""Name of the marker of a declaration, and its argument if that was taken away."""
_PATH = "/" + PLACE.decode()


class Declarations:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, listener: StepListener) -> None:
        """`listener` is told of every step."""
        self._context, self._listener = context, listener

    def read(self, sandbox: Sandbox) -> list[DeclaredService]:
        """The services that the files of a sandbox declare, as they stand there: with markers for secrets. UsageError,
        LimitExceeded: the file, which a program in the sandbox can write, is malformed."""
        source = f"{_PATH} in {sandbox.trajectory.shown_name}"
        data = _read_file(sandbox)
        if data is None:
            return []
        try:
            return list(service_file.parse(data.decode(), source))
        except UnicodeDecodeError as exc:
            raise UsageError(f"{source} is no UTF-8: {exc.reason}") from exc

    def commit(self, sandbox: Sandbox, text: str, told: dict[str, object]) -> Snapshot:
        """Write the declarations and take the snapshot that has them: both or neither."""
        told = self._context.secrecy.of(sandbox.trajectory).conceal(told)
        with sandbox.lock, turns.first(), placing.explain_errors("write", PLACE):
            before = _read_file(sandbox)
            _write_file(sandbox, text.encode())
            try:
                return commit_step(
                    self._context.catalog, sandbox, marker(DECLARED, told), self._listener, request=requests.present()
                )
            except BaseException:
                with contextlib.suppress(OSError, SnapshotdError):
                    _write_file(sandbox, before or b"")
                raise

    def check_new(self, sandbox: Sandbox, service: str, declared: Sequence[DeclaredService], *, runs: bool) -> None:
        """Check that a service may be declared. Conflict: one of that name is declared, or `runs`. LimitExceeded: there are too
        many."""
        name = sandbox.trajectory.shown_name
        if runs or any(one.name == service for one in declared):
            raise Conflict(
                f"{name} has a service {service} already: take it away first (`snapshotd kill --remove {name} {service}`), "
                "or choose another name"
            )
        if len(declared) >= SERVICES_MAX:
            raise LimitExceeded(
                f"{name} has {SERVICES_MAX} services already, and that is the most; take one away (`snapshotd kill --remove`)"
            )


def service_of(request: BackgroundRequest) -> DeclaredService:
    """The service that a request declares. UsageError."""
    asked = request.service
    assert asked is not None
    if request.stdin or request.timeout_s is not None:
        raise UsageError("a service has no input and no timeout; leave them out")
    return service_file.check(
        DeclaredService(
            asked.name,
            request.argv,
            request.cwd,
            tuple(request.env.items()),
            request.user,
            asked.ready,
            asked.ready_timeout_s,
            asked.port,
            asked.required,
            asked.restarts,
        )
    )


def encode_services(sandbox: Sandbox, services: Sequence[DeclaredService]) -> str:
    """The file that declares these. LimitExceeded, UsageError: it cannot."""
    text = service_file.write(services)
    service_file.check_size(text, f"{_PATH} in {sandbox.trajectory.shown_name}")
    return text


def unknown_service(sandbox: Sandbox, name: str, declared: Sequence[DeclaredService]) -> NotFound:
    known = ", ".join(service.name for service in declared) or "none"
    return NotFound(f"{sandbox.trajectory.shown_name} has no service {name[:80]!r}; it has: {known}")


@contextlib.contextmanager
def _root(sandbox: Sandbox) -> Iterator[int]:
    with sandbox.lock:
        sandbox.root.revive()
        fd = sandbox.root.open_root()
    with files.closing_fd(fd):
        yield fd


def _read_file(sandbox: Sandbox) -> bytes | None:
    """The content of the file; None: there is no such file. UsageError: it is no regular file. OSError."""
    with _root(sandbox) as root:
        try:
            held = files.open_in_root(root, PLACE, os.O_PATH | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            if exc.errno not in (errno.EXDEV, errno.ELOOP):
                raise
            raise UsageError(
                f"{_PATH} lies behind a link that cannot be followed among the sandbox's files; remove the link in the sandbox"
            ) from exc
        with files.closing_fd(held):
            if not stat.S_ISREG(os.fstat(held).st_mode):
                raise UsageError(f"{_PATH} is no regular file; remove it in the sandbox")
            with open(os.open(files.fd_path(held), os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
                return file.read(SERVICES_MAX_BYTES + 1)


def _write_file(sandbox: Sandbox, data: bytes) -> None:
    owner, id_map = placing.Owner(-1, -1), sandbox.container.id_map
    if sandbox.isolated:
        owner = placing.Owner() if id_map is None else placing.Owner(id_map.base, id_map.base)
    with _root(sandbox) as root, files.closing_fd(placing.open_unnamed(root)) as fd:
        files.write_all(fd, data)
        placing.put(root, PLACE, fd, owner, follow=False)
