"""The verbs that start, follow and end sandboxes and the programs in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from snapshotd.api import operations
from snapshotd.api.snapshots import SnapshotInfo, SnapshotOptions, SnapshotRequest
from snapshotd.api.trajectories import (
    CreateRequest,
    KeepAliveRequest,
    LimitsRequest,
    NetworkChange,
    NetworkInfo,
    NetworkRequest,
    Provider,
    RemoveOptions,
    RemoveQuery,
    RunAgentRequest,
    RunOptions,
    SandboxOptions,
    StopOptions,
    StopQuery,
    TrajectoryInfo,
)
from snapshotd.client.following import Following
from snapshotd.client.local.arguments import absolute, check_seconds, instances_of, local_path, texts_of, words_of
from snapshotd.client.local.sizes import LIMITS, limit_fields
from snapshotd.client.twofold import stream, verb
from snapshotd.client.verbs.base import VerbPart, Wait
from snapshotd.client.verbs.commands import OutputSink, ShownOutput
from snapshotd.errors import UsageError


class RunVerbs(VerbPart):
    """Part of `Snapshotd`."""

    _isolation: str | None

    def _note_isolation(self, sandbox: Mapping[str, Any]) -> None:
        if sandbox.get("runtime") == "none":
            self._isolation = "none"

    @verb
    async def create(
        self, *, wait: Wait = "captured", idle_timeout: float = 0, **sandbox: Unpack[SandboxOptions]
    ) -> tuple[TrajectoryInfo, SnapshotInfo]:
        """A sandbox without an agent, running, and its first snapshot. It ends with a last one after `idle_timeout`
        seconds without a command (0: never). More keywords are those of `SandboxOptions`."""
        check_seconds("idle_timeout", idle_timeout, zero=True)
        self._note_isolation(sandbox)
        body = CreateRequest(**sandbox_fields(sandbox), idle_timeout_s=idle_timeout)
        self._check_paths(body)
        made = await self._transport.call(operations.CREATE, body=body)
        return made.trajectory, await self._wait_until(made.snapshot, wait)

    @verb
    async def run(
        self,
        *,
        agent: str | Path | None = None,
        detach: bool = False,
        wait: Wait = "captured",
        **options: Unpack[RunOptions],
    ) -> TrajectoryInfo:
        """Start an agent file with `args`, or a `command`; `events` follows it. `user`: who runs it in
        the sandbox, as `USER[:GROUP]`; else root. `reuse`: its tool calls are answered from earlier runs that began in the
        same way, as long as it does the same; the event `finished` counts them, under "reused". `reuse_replies`: its model
        requests are, too. Further keywords: see `SandboxOptions`.

        If this process goes away before the answer, the run is stopped again unless `detach`. `wait` is for the
        snapshots so far, the first at least; for the others, call `flush` when the run has finished.
        """
        self._note_isolation(options)
        body = RunAgentRequest(**sandbox_fields(options), agent=absolute(agent, "agent"), detach=detach)
        self._check_paths(body)
        started = await self._transport.call(operations.RUN_AGENT, body=body)
        if wait == "stored":
            await self.flush(started.id)
        return started

    @stream
    async def events(
        self, ref: str, *, follow: bool = True, on_lost: Callable[[], object] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a run from its beginning; with `follow`, until `finished`.

        A follower outlives the daemon: when the daemon goes away, `on_lost` is called, and the next daemon (the first
        request starts it, where a daemon may be started) goes on behind the last event. DaemonUnavailable when for
        SNAPSHOTD_RECONNECT_S seconds (600 if not set; with 0 at once) no daemon could be followed, or the error that
        keeps one from starting; Conflict when another run of the trajectory has begun in the meantime. An agent that
        did not outlive its daemon has a `finished` whose status is `interrupted`.
        """
        if not follow:
            return await self._transport.lines(*operations.EVENTS.at(ref), query={"follow": False})
        return await self._follow(ref, ref, on_lost, None)

    async def _follow(
        self, ref: str, what: str, on_lost: Callable[[], object] | None, timeout: float | None
    ) -> AsyncIterator[dict[str, Any]]:
        return await Following(
            self._transport,
            operations.TRAJECTORY.to(ref),
            what=what,
            patience_s=self._reconnect_s,
            on_lost=on_lost,
            timeout=timeout,
        ).events()

    @verb
    async def wait(
        self, ref: str, *, on_output: OutputSink | None = None, timeout: float | None = None
    ) -> TrajectoryInfo:
        """Wait until the run of a trajectory, or of a fork's program, has ended, as `events` follows it; the trajectory
        then has its `status` and `exit_code`. All output from the beginning goes to `on_output`. UsageError: no program
        ever ran in it. StillRunning (a TimeoutError): it has not ended after `timeout` seconds, and runs on."""
        check_seconds("timeout", timeout)
        identity, ended = (await self.trajectory(ref)).id, False
        shown = ShownOutput(on_output)
        async for event in await self._follow(identity, ref, None, timeout):
            if event["event"] == "output":
                shown.show(event)
            ended = event["event"] == "finished"
        if not ended:
            raise UsageError(f"no program ever ran in {ref}, so there is no run to wait for")
        return await self.trajectory(identity)

    @verb
    async def take_snapshot(
        self, ref: str, name: str | None = None, *, wait: Wait = "captured", **options: Unpack[SnapshotOptions]
    ) -> SnapshotInfo:
        """Take a snapshot of a running sandbox as it is now, with `name` as its tag. Processes in it run on. With
        `if_changed`, the answer is the head if no file was written since; where processes were alive at the head, a
        snapshot may be taken all the same. Conflict: the trajectory does not run, its program is being replayed, or the
        name is taken."""
        return await self._step(operations.TAKE_SNAPSHOT, ref, SnapshotRequest(name, **options), wait)

    @verb
    async def stop(self, ref: str, *, wait: Wait = "captured", **options: Unpack[StopOptions]) -> TrajectoryInfo:
        """Take a last snapshot if anything changed and end the sandbox. Not an error when it is not running. With
        `discard` there is no last snapshot, and what changed since the head is lost. OutOfSpace: there is no room for the
        snapshot; the sandbox goes on."""
        stopped = await self._transport.call(operations.STOP, ref, query=StopQuery(**options))
        if wait == "stored":
            await self.flush(stopped.id)
        return stopped

    @verb
    async def keep_alive(self, trajectories: Sequence[str]) -> None:
        """Let their running sandboxes idle from now on anew, as if a command had just ended in each; at most 10,000. Not an
        error where none runs, or the trajectory is not there any more."""
        body = KeepAliveRequest(tuple(words_of("trajectories", trajectories)))
        await self._transport.call(operations.KEEP_ALIVE, body=body)

    @verb
    async def network(self, ref: str, **change: Unpack[NetworkChange]) -> NetworkInfo:
        """The network of a trajectory's sandboxes, after these changes of the hosts that they reach: first `only`, in the
        place of all rules so far, then `deny` (`*`: none), then `allow`. They are in force when this returns, in a sandbox that
        runs, too: connections that are not allowed any more are cut. Forks that are made later have them. Conflict: its
        network is not one of `allow:`."""
        given = {name: rules for name, rules in change.items() if rules or (name == "only" and rules is not None)}
        if not given:
            return await self._transport.call(operations.NETWORK, ref)
        body = NetworkRequest(**{name: tuple(words_of(name, rules)) for name, rules in given.items()})
        return await self._transport.call(operations.CHANGE_NETWORK, ref, body=body)

    @verb
    async def remove(self, ref: str, **options: Unpack[RemoveOptions]) -> None:
        """Forget a trajectory and free what only it used. Conflict when it runs (unless `force`) or has forks;
        UsageError: `ref` is a tag or a snapshot."""
        await self._transport.call(operations.REMOVE, ref, query=RemoveQuery(**options))


def services_text(path: str | Path) -> str:
    """The content of a local file of services. UsageError, LimitExceeded."""
    try:
        text = local_path(path, "services").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is no UTF-8"
        raise UsageError(
            f"the file of services {str(path)!r} cannot be read: {why}; name one that you may read"
        ) from exc
    from snapshotd.service import parse  # tomllib and its record take 5 ms

    parse(text, str(path))
    return text


def sandbox_fields(options: SandboxOptions) -> dict[str, Any]:
    """The fields of a new sandbox, or of a run, that are given, by their names in its request. UsageError for text that is no
    amount."""
    fields: dict[str, Any] = {name: value for name, value in options.items() if name not in LIMITS}
    fields |= {
        name: absolute(fields[name], name) for name in ("workspace", "requirements", "program") if name in fields
    }
    fields |= {name: texts_of(name, fields[name]) for name in ("env", "secrets") if name in fields}
    fields |= {name: tuple(words_of(name, fields[name])) for name in ("args", "command") if name in fields}
    if "providers" in fields:
        fields["providers"] = tuple(instances_of("providers", fields["providers"], Provider))
    if fields.get("services") is not None:
        fields["services"] = services_text(fields["services"])
    return {**fields, "limits": LimitsRequest(**limit_fields(options))}
