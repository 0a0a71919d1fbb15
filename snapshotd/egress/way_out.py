"""The way out of one sandbox, as the daemon has it: its rules, what they refused, and its proxy, started again if it is
killed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from snapshotd.egress.proxy import Holder, ProxyProcess, SandboxEnds
from snapshotd.errors import SandboxFailed
from snapshotd.network import HostRules

_log = logging.getLogger(__name__)
_REVIVAL_PAUSE_S = 1.0
"""A proxy that dies at once is not started more often. One that cannot be started is tried again after twice as long."""
_REVIVAL_PAUSE_MOST_S = 60.0
MOST_REFUSED = 50
"""Sentences about refusals that one snapshot has; one more counts the others."""


class WayOut:
    """See `base.py`. Thread-safe. Until `apply`, nothing is reached."""

    def __init__(self, sandbox: SandboxEnds, proxy: ProxyProcess) -> None:
        """Takes them over."""
        self._sandbox, self._proxy = sandbox, proxy
        self._lock = threading.RLock()
        self._rules, self._suspended = HostRules(()), False
        self._refused: dict[str, None] = {}
        self._left_out = 0
        self._closed = False
        self._tried_at, self._pause_s = 0.0, _REVIVAL_PAUSE_S
        self._conceal: Callable[[str], str] = str
        self._keep: Callable[[ProxyProcess], object] = lambda _: None

    @classmethod
    def make(cls, name: str, pid: int) -> WayOut:
        """A new one for a sandbox's init. Its proxy is about to start. SandboxFailed; nothing is left then."""
        try:
            sandbox = SandboxEnds(name, pid)
            try:
                return cls(sandbox, ProxyProcess.start(sandbox))
            except BaseException:
                sandbox.close()
                raise
        except OSError as exc:
            raise SandboxFailed(f"the way out of sandbox {name} cannot be made: {exc.strerror or exc}") from exc

    @classmethod
    def find(cls, name: str, pid: int, holder: Holder, key: str) -> WayOut | None:
        """The one that an earlier daemon has left to the holder; None: there is none any more."""
        proxy = ProxyProcess.find(holder, key)
        return None if proxy is None else cls(SandboxEnds(name, pid), proxy)

    def keep(self, holder: Holder, key: str) -> list[str]:
        """Have it outlive this daemon. Returns the keys under which the holder has it. SandboxFailed."""
        with self._lock:
            self._keep = lambda proxy: proxy.keep(holder, key)
            return self._proxy.keep(holder, key)

    def conceal_with(self, conceal: Callable[[str], str]) -> None:
        """Take the secrets out of what a snapshot and the log will have, from now on."""
        self._conceal = conceal

    def apply(self, rules: HostRules) -> None:
        """Put rules in force. On return the sandbox reaches what they allow, and connections that they do not allow are
        cut. SandboxFailed: nothing is reached."""
        with self._lock:
            self._rules = rules
            self._put_in_force()

    def suspend(self) -> None:
        """Reach nothing until `resume`. SandboxFailed, and so does `resume`."""
        with self._lock:
            self._suspended = True
            self._put_in_force()

    def resume(self) -> None:
        """Reach what the rules allow again."""
        with self._lock:
            self._suspended = False
            self._put_in_force()

    def _put_in_force(self) -> None:
        if self._closed:
            raise SandboxFailed(f"the sandbox {self._sandbox.name} has ended, and its way out with it")
        self._read()
        if not self._proxy.has_ended:
            try:
                self._note(self._proxy.apply(self._in_force()))
                return
            except OSError:
                self._proxy.kill()  # so that its old rules are not in force either
        self._revive()

    def _in_force(self) -> HostRules:
        return HostRules(()) if self._suspended else self._rules

    def _revive(self) -> None:
        """A new proxy in the place of one that has ended. SandboxFailed."""
        _log.warning("the proxy of sandbox %s has ended and is started again", self._sandbox.name)
        try:
            started = ProxyProcess.start(self._sandbox)
            self._proxy.close()
            self._proxy = started
            self._note(started.apply(self._in_force()))
            self._keep(started)
        except OSError as exc:
            self._proxy.kill()
            raise SandboxFailed(
                f"the proxy of sandbox {self._sandbox.name} cannot be started again, and no host is reached: {exc.strerror or exc}"
            ) from exc

    @property
    def refused(self) -> tuple[str, ...]:
        """Sentences about what was refused and was not forgotten yet, at most `MOST_REFUSED`, and one that counts more."""
        with self._lock:
            self._read()
            more = (f"{self._left_out} more refusals",) if self._left_out else ()
            return (*self._refused, *more)

    def forget_refused(self, sentences: Iterable[str]) -> None:
        """Forget sentences that a snapshot has."""
        with self._lock:
            for sentence in sentences:
                self._refused.pop(sentence, None)
            self._left_out = 0

    def _read(self) -> None:
        if not self._closed:
            self._note(self._proxy.receive())

    def _note(self, sentences: Iterable[str]) -> None:
        for sentence in map(self._conceal, sentences):
            if sentence in self._refused:
                continue
            if len(self._refused) >= MOST_REFUSED:
                self._left_out += 1
                continue
            self._refused[sentence] = None
            _log.warning("refused to sandbox %s: %s", self._sandbox.name, sentence)

    @property
    def control_fd(self) -> int | None:
        """Readable when there is something to read; None: its proxy has ended."""
        with self._lock:
            return None if self._closed or self._proxy.has_ended else self._proxy.control.fileno()

    def mend(self) -> bool:
        """Take what the proxy has said, and start it again if it was killed, unless that was just tried. False: it is
        closed, or its sandbox has ended."""
        with self._lock:
            self._read()
            if self._closed or self._sandbox.has_ended:
                return False
            if (
                not self._proxy.has_ended
                or time.monotonic() < max(self._proxy.started_at, self._tried_at) + self._pause_s
            ):
                return True
            self._tried_at = time.monotonic()
            try:
                self._revive()
                self._pause_s = _REVIVAL_PAUSE_S
            except (SandboxFailed, OSError, RuntimeError) as exc:  # RuntimeError: no thread can be started
                self._pause_s = min(_REVIVAL_PAUSE_MOST_S, self._pause_s * 2)
                _log.error("%s; the next try is in %.0f s", exc, self._pause_s)
            return True

    def close(self) -> None:
        """End it, and wait until its proxy has ended. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._proxy.close()
                self._sandbox.close()
