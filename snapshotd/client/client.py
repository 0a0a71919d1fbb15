"""`Snapshotd` and `AsyncSnapshotd`: every verb of the daemon as a method. The CLI is built on the one, and the
object-shaped API in sandbox.py on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack

from snapshotd.api.commands import ExecInfo, TrialOptions
from snapshotd.api.wire import socket_path_of
from snapshotd.client.exchange import AGAIN_S
from snapshotd.client.links import Links, ThreadLinks
from snapshotd.client.local.arguments import local_path, texts_of
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import Blocking, verb
from snapshotd.client.verbs.access import AccessVerbs
from snapshotd.client.verbs.approvals import ApprovalVerbs
from snapshotd.client.verbs.commands import CommandVerbs, OutputSink
from snapshotd.client.verbs.experiments import ExperimentVerbs
from snapshotd.client.verbs.files import FileVerbs
from snapshotd.client.verbs.fleet import FleetVerbs
from snapshotd.client.verbs.forks import ForkVerbs
from snapshotd.client.verbs.history import HistoryVerbs
from snapshotd.client.verbs.inspection import InspectionVerbs
from snapshotd.client.verbs.ports import Port, PortT, PortVerbs
from snapshotd.client.verbs.runs import RunVerbs
from snapshotd.client.verbs.sharing import SharingVerbs
from snapshotd.client.verbs.storage import StorageVerbs
from snapshotd.client.verbs.values import ValueVerbs
from snapshotd.client.ways import SocketWay, Way, way_to

R = TypeVar("R")


class Verbs(
    RunVerbs,
    CommandVerbs,
    ForkVerbs,
    InspectionVerbs,
    HistoryVerbs,
    ApprovalVerbs,
    ExperimentVerbs,
    ValueVerbs,
    FileVerbs,
    SharingVerbs,
    StorageVerbs,
    AccessVerbs,
    FleetVerbs,
    PortVerbs[PortT],
    Generic[PortT],
):
    """One daemon. Cheap to make, and holds no connection: one serves any number of threads, or tasks.

    `state_dir` and `socket` default to SNAPSHOTD_STATE_DIR and SNAPSHOTD_SOCKET, then to /var/lib/snapshotd (for
    another user than root, to `$XDG_STATE_HOME/snapshotd`) and its snapshotd.sock. With `autostart` (the default), the first
    request starts a daemon when none answers;
    never when only a socket was named, since its daemon then lives elsewhere (a container, a service) and would find
    its place taken.

    `host` (SNAPSHOTD_HOST) is the place of a daemon on another machine, where no `state_dir` or `socket` is named:
    "https://HOST:PORT" with a `token` (SNAPSHOTD_TOKEN) and the fingerprint of its certificate as `pin`
    (SNAPSHOTD_TLS_PIN), or the certificates in `ca` (SNAPSHOTD_TLS_CA); what `snapshotd login` has kept takes the place of
    what is left out. Or "ssh://USER@HOST", through the user's ssh. Paths of this machine mean nothing to such a daemon:
    what would send one raises UsageError.

    A request that makes something is made once. Where its answer is lost, because the daemon was killed or the connection
    cut, it is asked for again, at most three times, for up to 10 seconds (SNAPSHOTD_RECONNECT_S, if that is less)
    without a daemon.

    `request_timeout`: seconds within which the daemon answers a request, or DaemonUnavailable is raised; None, the
    default: no limit. Commands, transfers and what is followed take as long as they take; `exec` has a `timeout` of its
    own.

    Every method may raise DaemonUnavailable, VersionMismatch and NotPermitted besides its own errors, and NotFound or
    Ambiguous for a ref: a tag, a name, or a unique prefix of an id. Local paths may be relative to the working
    directory.

    Methods that make a snapshot take `wait`. With "stored" they return when the snapshot survives power loss, and raise
    OutOfSpace, DataLoss or InternalError when it cannot be stored; it is captured all the same.
    """

    def __init__(
        self,
        state_dir: str | Path | None = None,
        socket: str | Path | None = None,
        *,
        autostart: bool = True,
        request_timeout: float | None = None,
        isolation: str | None = None,
        host: str | None = None,
        token: str | None = None,
        pin: str | None = None,
        ca: str | Path | None = None,
    ) -> None:
        """UsageError for settings in the environment that make no sense."""
        from snapshotd.config import CLIENT, read

        config = read(CLIENT)
        self._state_dir, self._reconnect_s = local_path(state_dir or config.state_dir), config.reconnect_s
        self._isolation = isolation
        host = host or (config.host if state_dir is None and socket is None else None)
        start = None
        way: Way
        if host:
            own_ca = ca or config.tls_ca
            signed_by = str(local_path(own_ca, "ca")) if own_ca else None
            way = way_to(host, token or config.token or None, pin or config.tls_pin or None, signed_by)
        else:
            named = socket or (config.socket if state_dir is None else None)
            way = SocketWay(local_path(named) if named else socket_path_of(self._state_dir))
            elsewhere = bool(named) and not (state_dir or "state_dir" in config.given)
            start = self._start if autostart and not elsewhere else None
        patience_s = min(self._reconnect_s, AGAIN_S)
        self._transport = Transport(way, start, links=self._links(), timeout_s=request_timeout, patience_s=patience_s)

    @property
    def state_dir(self) -> Path:
        """The daemon's state directory. UsageError: it is on another machine."""
        self._check_here("its state directory")
        return self._state_dir

    @property
    def socket_path(self) -> Path:
        """The daemon's socket. UsageError: it is on another machine."""
        self._check_here("its socket")
        assert isinstance(self._transport.way, SocketWay)
        return self._transport.way.socket_path

    def _links(self) -> Links:
        """The connections of this form of the client."""
        raise NotImplementedError

    def _start(self) -> None:
        from snapshotd.client.autostart import start_daemon  # only then: subprocess costs 10 ms to import

        start_daemon(self._state_dir, self.socket_path, isolation=self._isolation)

    @verb
    async def tag_if(
        self,
        ref: str,
        name: str,
        argv: Sequence[str],
        *,
        on_output: OutputSink | None = None,
        **options: Unpack[TrialOptions],
    ) -> ExecInfo:
        """Run a command in a throw-away fork of a snapshot (of a trajectory: of its head, as it is now), and move the
        tag to that snapshot if it ends with exit code 0. Returns how it ended. $SNAPSHOTD_JUNIT is set as in
        `exec_junit`; nobody reads a report."""
        from snapshotd.scores import REPORT_PATH, REPORT_VARIABLE

        snapshot = (await self.snapshot(ref)).id
        options["env"] = {REPORT_VARIABLE: REPORT_PATH, **texts_of("env", options.get("env"))}
        done = await self.exec_snapshot(snapshot, argv, on_output=on_output, **options)
        if done.exit_code == 0:
            await self.tag(snapshot, name, move=True)
        return done


class Snapshotd(Blocking, Verbs[Port]):
    __doc__ = Verbs.__doc__

    _port = Port

    @classmethod
    def _over(cls, transport: Transport) -> Snapshotd:
        """A client of the daemon at the end of this transport, whose connections block."""
        client = cls(socket="/", autostart=False)
        client._transport = transport
        return client

    def _links(self) -> Links:
        return ThreadLinks()

    async def _in_thread(self, work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return work(Snapshotd._over(self._transport), *args, **kwargs)
