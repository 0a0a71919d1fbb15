"""`MiniEnvironment`: a sandbox for mini-swe-agent. Each action is one snapshot, and the observation names it."""

from __future__ import annotations

import logging
import os
import platform
import weakref
from typing import Any, Literal

from minisweagent.environments.local import LocalEnvironment
from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel, Field

from snapshotd.client import ExecResult, Sandbox, Snapshotd
from snapshotd.errors import CommandNotFound, CommandNotRunnable, SnapshotdError, UsageError

IDLE_S = 1800.0
"""A sandbox whose agent has gone away ends, with a last snapshot, after so many seconds without a command."""
_MERGED = 'exec "$@" 2>&1'
_log = logging.getLogger("minisweagent.environment")


class MiniEnvironmentConfig(BaseModel):
    """The words of mini-swe-agent's Docker environment, and those of `Sandbox.create`. `forward_env` names variables of this
    process. `user` runs the commands; else root. `snapshot`: the sandbox is a fork of that one, and `image` is not used."""

    image: str = "default"
    cwd: str = "/workspace"
    env: dict[str, str] = Field(default_factory=dict)
    forward_env: list[str] = Field(default_factory=list)
    timeout: int = 30
    interpreter: list[str] = Field(default_factory=lambda: ["bash", "-lc"])
    runtime: Literal["auto", "runc", "docker", "none"] = "auto"
    network: str | None = None
    user: str | None = None
    snapshot: str | None = None


class MiniEnvironment(LocalEnvironment):
    """One sandbox, begun before the first request to the model, and stopped when the environment goes away. It keeps its
    snapshots. An error of the daemon ends the run, with the error's class as its exit status."""

    def __init__(self, *, config_class: type = MiniEnvironmentConfig, **kwargs: Any) -> None:
        super().__init__(config_class=config_class, **kwargs)
        self._client = Snapshotd()
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        """The sandbox, which is begun if need be."""
        if self._box is None:
            self._box = self._begin(self.config.snapshot)
        return self._box

    def fork(self, snapshot: str) -> None:
        """Go on with the files of a snapshot, in a fork of it."""
        self._box = self._begin(snapshot)

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run an action. `extra` of what it answers names the snapshot. An action that takes too long is ended with all that
        it started; its output is there, with the return code -1."""
        limit = timeout or self.config.timeout
        words = ["/bin/sh", "-c", _MERGED, "sh", *self.config.interpreter, action.get("command", "")]
        named = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        try:
            done = self.box.exec(
                words, cwd=cwd or self.config.cwd, env=named | self.config.env, user=self.config.user, timeout=limit
            )
        except (UsageError, CommandNotFound, CommandNotRunnable) as exc:  # no such folder or user: the model's to see
            return _failure("", exc, {"trajectory": self.box.id})
        extra = {"trajectory": self.box.id, "snapshot": done.snapshot_id}
        output = (
            _failure(_output_of(done), TimeoutError(f"it took longer than {limit} s"), extra)
            if done.timed_out
            else None
        )
        output = output or {
            "output": _output_of(done),
            "returncode": done.exit_code,
            "exception_info": "",
            "extra": extra,
        }
        try:
            self._check_finished(output)
        except Submitted as submitted:
            submitted.messages[0]["extra"] |= extra
            raise
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """As mini-swe-agent's own. A run needs them before it asks the model, so the sandbox begins here."""
        begun = {"trajectory": self.box.id}
        return recursive_merge(self.config.model_dump(), platform.uname()._asdict(), begun, kwargs)

    def _begin(self, snapshot: str | None) -> Sandbox:
        if snapshot is not None:
            box = Sandbox(self._client, self._client.fork(snapshot, idle_timeout=IDLE_S).trajectories[0])
        else:
            more: dict[str, Any] = {} if self.config.network is None else {"network": self.config.network}
            box = Sandbox.create(
                client=self._client, image=self.config.image, runtime=self.config.runtime, idle_timeout=IDLE_S, **more
            )
        weakref.finalize(self, _stop, box)
        return box


def _output_of(done: ExecResult) -> str:
    return done.stdout + done.stderr


def _failure(output: str, exc: Exception, extra: dict[str, Any]) -> dict[str, Any]:
    """The answer of mini-swe-agent's own environments for an action that failed in another way than by its exit code."""
    kind = {"exception_type": type(exc).__name__, "exception": str(exc)}
    info = f"An error occurred while executing the command: {exc}"
    return {"output": output, "returncode": -1, "exception_info": info, "extra": kind | extra}


def _stop(box: Sandbox) -> None:
    try:
        box.stop()
    except SnapshotdError as exc:
        _log.warning("sandbox %s was not stopped: %s", box.id[:12], exc.message)
