"""The tools that go several ways: forks, compared, scored, searched, merged and promoted."""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import Context
from pydantic import Field

from snapshotd.api import operations
from snapshotd.api.wire import FORK_MAX
from snapshotd.client.outcomes import argv_or_shell
from snapshotd.integrations.mcp import answers
from snapshotd.integrations.mcp.tools import (
    IDLE_S,
    TIMEOUT_S,
    Command,
    Ref,
    Timeout,
    ToolSet,
    Trajectory,
    answer_of,
    report_progress,
    tool,
    trajectory_of,
)


class BranchTools(ToolSet):
    @tool(operations.FORK, "Fork a snapshot", subject="snapshot")
    async def fork(
        self,
        snapshot: Ref,
        n: Annotated[int, Field(description="Number of forks.", ge=1, le=FORK_MAX)] = 1,
        name: Annotated[str | None, Field(description="A name; `{index}` in it is the fork's number from 0.")] = None,
    ) -> answers.ForksAnswer:
        """Start `n` new sandboxes from a snapshot, to try several ways side by side. Each is a trajectory of its own: work in
        them with `exec`, then `compare` or `score` them, and `promote` the best."""
        forked = await self._client.fork(await self._snapshot(snapshot), n, name=name, idle_timeout=IDLE_S)
        return answers.ForksAnswer(trajectories=[trajectory_of(info) for info in forked.trajectories])

    @tool(operations.COMPARE, "Compare branches")
    async def compare(
        self,
        refs: Annotated[
            list[str], Field(description="Two or more trajectories or snapshots.", min_length=2, max_length=16)
        ],
    ) -> answers.CompareAnswer:
        """Compare branches from the last snapshot that they share: calls, failures, files. Each against the first."""
        found = await self._client.compare(*[await self._any(ref) for ref in refs])
        differences = [pair.first_difference for pair in found.pairs]
        return answers.CompareAnswer(
            fork_point=None if found.fork_point is None else found.fork_point.id,
            sides=[answer_of(answers.SideAnswer, side) for side in found.branches],
            first_differences=[
                "none" if one is None else f"call {one.number}: {one.difference}" for one in differences
            ],
            differing_files=[
                [answer_of(answers.ChangeAnswer, one) for one in pair.changes[: answers.ITEMS]] for pair in found.pairs
            ],
        )

    @tool(operations.SCORE, "Score branches by a command", subject="refs", outside=True)
    async def score(
        self,
        ctx: Context,
        refs: Annotated[list[str], Field(description="Trajectories or snapshots.", min_length=1, max_length=256)],
        command: Command,
        number: Annotated[bool, Field(description="The score is the last line of output that is a number.")] = False,
        junit: Annotated[
            str | None, Field(description="The score is the share of tests that passed in this report.")
        ] = None,
        repeat: Annotated[int, Field(ge=1, le=20)] = 1,
        timeout_s: Timeout = TIMEOUT_S,
    ) -> answers.ScoresAnswer:
        """Run a command in a throw-away fork of each branch and rank them. The score is 1 for exit code 0, else 0, unless
        said otherwise."""
        targets = [await self._any(ref) for ref in refs]
        async with report_progress(ctx) as say:
            rows = await self._client.score(
                targets,
                argv_or_shell(command),
                number=number,
                junit=junit,
                repeat=repeat,
                timeout=timeout_s,
                on_run=lambda row, _run: say(f"a run of {row.ref[:12]} has ended"),
            )
        named = dict(zip(targets, refs, strict=True))
        return answers.ScoresAnswer(
            rows=[
                answers.ScoreAnswer(
                    ref=named.get(row.ref, row.ref),
                    snapshot="" if row.snapshot is None else row.snapshot.id,
                    rank=row.rank,
                    score=row.mean,
                    errors=[run.error for run in row.runs if run.error is not None],
                )
                for row in rows
            ]
        )

    @tool(operations.BISECT, "Find the call that broke it", subject="trajectory", outside=True)
    async def bisect(
        self,
        ctx: Context,
        trajectory: Trajectory,
        command: Command,
        good: Annotated[str | None, Field(description="A snapshot where it passes; null: the first one.")] = None,
        bad: Annotated[str | None, Field(description="A snapshot where it fails; null: the newest.")] = None,
    ) -> answers.BisectAnswer:
        """Find the first snapshot of a trajectory at which a command fails, by runs in throw-away forks. Exit code 0 passes,
        125 cannot tell, all else fails. Then look at that call with `show` and `diff`."""
        ends = [None if ref is None else await self._snapshot(ref) for ref in (good, bad)]
        target = await self._id(trajectory)
        async with report_progress(ctx) as say:
            found = await self._client.bisect(
                target,
                argv_or_shell(command),
                good=ends[0],
                bad=ends[1],
                on_tried=lambda one: say(f"{one.snapshot.id[:12]} is {one.outcome}"),
            )
        return answers.BisectAnswer(
            first_bad=answers.snapshot_of(found.first_bad),
            last_good=found.last_good.id,
            unknown=[info.id for info in found.unknown],
            flaky=found.flaky,
        )

    @tool(operations.MERGE, "Merge files of a branch", subject="into", destructive=True)
    async def merge(
        self,
        source: Annotated[str, Field(description="The branch whose changes are taken.")],
        into: Annotated[str, Field(description="The trajectory that gets them.")],
        dry_run: Annotated[bool, Field(description="Only say what would change.")] = False,
    ) -> answers.MergeAnswer:
        """Bring the files that a branch has changed in /workspace to another trajectory, three-way, as one snapshot. With
        conflicts nothing is merged."""
        done = await self._client.merge(await self._snapshot(source), await self._id(into), dry_run=dry_run)
        return answers.MergeAnswer(
            snapshot=None if done.snapshot is None else done.snapshot.id,
            changes=[
                answers.ChangeAnswer(change=one.change, path=one.path.decode(errors="replace"))
                for one in done.changes[: answers.ITEMS_MAX]
            ],
            conflicts=[f"{one.path.decode(errors='replace')}: {one.reason}" for one in done.conflicts],
            warnings=[*done.warnings],
        )

    @tool(operations.PROMOTE, "Make a fork the trajectory", subject="trajectory", destructive=True)
    async def promote(
        self,
        trajectory: Trajectory,
        leave_behind: Annotated[
            bool, Field(description="Also if the trajectory that it was forked from took steps since.")
        ] = False,
    ) -> answers.SnapshotAnswer:
        """Make a fork's state the state of the trajectory that it was forked from. `undo` there takes it back."""
        info = await self._reach.trajectory(trajectory)
        if info.forked_from is not None:
            await self._reach.trajectory((await self._client.snapshot(info.forked_from)).trajectory)
        return answers.snapshot_of(await self._client.promote(info.id, leave_behind=leave_behind))
