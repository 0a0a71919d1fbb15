"""The verbs of forks: they are made, compared, scored, and searched for the call that broke something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from snapshotd.api import operations
from snapshotd.api.commands import CommandOptions, TrialOptions
from snapshotd.api.record import UNSET, Json
from snapshotd.api.trajectories import (
    ForkInfo,
    ForkOptions,
    ForkQueueOptions,
    ForkQueueRequest,
    ForkRequest,
    QueuedFork,
    QueueInfo,
)
from snapshotd.api.wire import FORK_MAX, QUEUE_MAX, check_ref
from snapshotd.client.local.arguments import check_count, check_seconds, local_path, refs_of, words_of
from snapshotd.client.twofold import closing, verb
from snapshotd.client.verbs.base import VerbPart, Wait
from snapshotd.client.verbs.commands import command_fields
from snapshotd.errors import DaemonUnavailable, UsageError

if TYPE_CHECKING:
    from snapshotd.api.experiments import CompareInfo, Tried
    from snapshotd.client.branching.results import BisectInfo, ScoreInfo
    from snapshotd.scores import ScoredRun


class ForkVerbs(VerbPart):
    """Part of `Snapshotd`."""

    @verb
    async def fork(self, ref: str, n: int = 1, *, wait: Wait = "captured", **options: Unpack[ForkOptions]) -> ForkInfo:
        """`n` (1..256) new trajectories from one snapshot, each with a running sandbox, all or none. With `args` the
        program starts in each; `{index}` in an argument is the fork's number from 0. With `resume` it is replayed up to
        the snapshot (with `args`, if given) and goes on from there.

        `variants` makes one child for each, in their order: a label, and the keywords in which it differs. `name` and
        `args` go before those of the fork; `env` and `secrets` are added to the source's; `network`, `memory`, `cpus`,
        `pids` and `disk` are as in `create`; `files`, `messages`, `drop_messages`, `add_messages`, `result` and `state`
        as in `edit`; every model request through the child's gateway asks for `model`. `{index}` and `{variant}` in
        names, arguments and values of the environment become the child's number and label. `n` is left out then.

        `wait` covers the snapshot that they begin at and their snapshots so far. `idle_timeout`: as `create`; None: the
        daemon's default (half an hour). UsageError before anything starts."""
        check_count("n", n, 1, FORK_MAX)
        fields = _fork_fields(options, FORK_MAX)
        if "variants" in fields and n != 1:
            raise UsageError("a fork with variants has one child for each; leave the number out")
        body = ForkRequest(n=UNSET if "variants" in fields else n, **fields)
        forked = await self._transport.call(operations.FORK, ref, body=body)
        if wait == "stored":
            origins = {item.forked_from for item in forked.trajectories if item.forked_from is not None}
            for line in (
                *[(await self.snapshot(origin)).trajectory for origin in origins],
                *(item.id for item in forked.trajectories),
            ):
                await self.flush(line)
        return forked

    @verb
    async def fork_queue(
        self,
        ref: str,
        n: int = 1,
        *,
        on_child: Callable[[QueuedFork], object] = lambda _: None,
        **options: Unpack[ForkQueueOptions],
    ) -> QueueInfo:
        """`n` (1..10,000) forks, `parallel` at once (None: as many as fit into the free memory): each runs its program
        to the end, then another begins. Returns when all have ended. `args`, `name`, `resume`, `variants`:
        as `fork`; one of them has to give the forks a program. `on_child` is told of each that has ended.

        When one does not start, those that did are removed, and its error is raised; with `keep_going` it carries the
        error, and the rest goes on. UsageError before anything starts."""
        body = ForkQueueRequest(n, **_fork_fields(options, QUEUE_MAX))
        async with closing(await self._transport.lines(*operations.FORK_QUEUE.at(ref), body=body)) as events:
            async for event in events:
                if event["event"] == "result":
                    return QueueInfo.of(event)
                on_child(QueuedFork.of(event))
        raise DaemonUnavailable(
            "the daemon ended the queue without a result; forks that run go on, and `snapshotd ls` lists them"
        )

    @verb
    async def compare(self, *refs: str | Sequence[str]) -> CompareInfo:
        """Two or more trajectories or snapshots, call by call from the last snapshot that all have, each against the
        first; and how each came out. Each is an argument of its own, or one list has all."""
        from snapshotd.api.experiments import CompareRequest

        body = CompareRequest(tuple(map(check_ref, refs_of(refs))))
        return await self._transport.call(operations.COMPARE, body=body)

    @verb
    async def bisect(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        good: str | None = None,
        bad: str | None = None,
        parallel: int = 1,
        repeat: int = 1,
        on_tried: Callable[[Tried], object] = lambda _: None,
        **options: Unpack[TrialOptions],
    ) -> BisectInfo:
        """The first snapshot of a line at which a command fails, by runs in throw-away forks, `parallel` at once. Exit
        code 0 passes, 125 cannot tell, everything else fails. `good` is the line's first snapshot unless named, `bad`
        its head. The border runs `repeat` times again, to find a flaky command. `on_tried` is told of each run. It ends
        when this process goes away.

        UsageError: the command fails at the good end, or passes at the bad one.
        """
        from snapshotd.api.experiments import BisectRequest, Tried
        from snapshotd.client.branching.results import BisectInfo

        body = BisectRequest(
            **command_fields(argv, **options),
            ref=check_ref(ref),
            good=None if good is None else check_ref(good),
            bad=None if bad is None else check_ref(bad),
            parallel=parallel,
            repeat=repeat,
        )
        tried: list[Json] = []
        async with closing(await self._transport.lines(*operations.BISECT.at(), body=body)) as events:
            async for event in events:
                if event["event"] == "result":
                    return BisectInfo.of({**event, "tried": tried})
                tried.append(event)
                on_tried(Tried.of(event))
        raise DaemonUnavailable("the daemon ended the bisection without a result; repeat it")

    @verb
    async def score(
        self,
        refs: Sequence[str],
        argv: Sequence[str],
        *,
        each: bool = False,
        number: bool = False,
        junit: str | None = None,
        with_files: str | Path | None = None,
        with_path: str | None = None,
        repeat: int = 1,
        parallel: int | None = None,
        on_run: Callable[[ScoreInfo, ScoredRun], object] = lambda _row, _run: None,
        **options: Unpack[CommandOptions],
    ) -> tuple[ScoreInfo, ...]:
        """Run a command in a throw-away fork of each snapshot (of a trajectory: its head; with `each`: all of its own),
        `repeat` times each, `parallel` at once (None: as many as there are processors), and rank them. It ends when this
        process goes away.

        The score is 1 for exit code 0, else 0; with `number` the last line of standard output that is a number; with
        `junit` the share of tests that passed, from a report that the run leaves at that path in the fork. The fork
        alone gets the content of the local folder `with_files` (16 MiB at most), at `with_path` (/tmp/score unless
        given), in place of anything there; it needs `sh` and `tar` in the image for that. `on_run` is told of each run
        as it ends, with the row that it belongs to.

        A run without a score, or of more than `timeout` seconds, carries its error, and the rest goes on. UsageError
        and LimitExceeded before anything runs.
        """
        from snapshotd.api.experiments import ScoreRequest
        from snapshotd.client.branching.results import ScoreInfo
        from snapshotd.client.local.scorer_files import folder_b64
        from snapshotd.scores import ScoredRun

        body = ScoreRequest(
            **command_fields(argv, **options),
            refs=tuple(words_of("refs", refs)),
            each=each,
            number=number,
            junit=junit,
            files_b64=None if with_files is None else folder_b64(local_path(with_files, "with_files")),
            files_path=None if with_files is None else with_path,
            repeat=repeat,
            parallel=parallel,
        )
        async with closing(await self._transport.lines(*operations.SCORE.at(), body=body)) as events:
            async for event in events:
                if event["event"] == "result":
                    return tuple(map(ScoreInfo.from_json, event["rows"]))
                on_run(ScoreInfo.from_json(event), ScoredRun.from_json(event["run"]))
        raise DaemonUnavailable("the daemon ended the scores without a result; repeat them")


def _fork_fields(options: ForkOptions | ForkQueueOptions, most: int) -> dict[str, Any]:
    """The fields of a fork that are given, by their names in its request. UsageError: there are no variants, or more than `most`."""
    fields: dict[str, Any] = dict(options)
    if fields.get("args") is not None:
        fields["args"] = tuple(words_of("args", fields["args"]))
    if "idle_timeout" in fields:
        check_seconds("idle_timeout", fields["idle_timeout"], zero=True)
        fields["idle_timeout_s"] = fields.pop("idle_timeout")
    if (variants := fields.pop("variants", None)) is not None:
        from snapshotd.client.branching.variants import variant_fields

        fields["variants"] = variant_fields(variants, most)
    return fields
