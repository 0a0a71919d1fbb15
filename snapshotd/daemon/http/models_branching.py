"""The API's words about what is done with forks: comparisons, scores, bisections and experiments."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from snapshotd import types as t
from snapshotd.daemon.http.models import Answer, Request, SandboxFields, Snapshot, change_json, check_argv, environment
from snapshotd.daemon.http.models_forks import VariantFields
from snapshotd.daemon.http.wire import FILES_MAX_BYTES, QUEUE_MAX, TIMEOUT_MAX_S, check_ref
from snapshotd.engine import branches as spec
from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.scores import REPEAT_MAX, SCORE_TIMEOUT_S, SCORER_PATH, ExperimentInfo, ScoredRun

Json = dict[str, Any]
_Positive = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False)]


def _of(snapshot: t.Snapshot | None) -> Snapshot | None:
    return None if snapshot is None else Snapshot.of(snapshot)


# -- comparisons -------------------------------------------------------------------------------------------------------


class CompareRequest(Request):
    refs: list[str] = Field(
        max_length=256, description="Two or more trajectories or snapshots. Each is compared with the first."
    )


class AlignedCall(Answer):
    """One row of an alignment."""

    number: int = Field(description="Counts calls from 1, at the beginning of the trajectories.")
    difference: spec.Difference = Field(
        description="`left`, `right`: only the first, or only the second side has the call."
    )
    left: Snapshot | None
    right: Snapshot | None

    @staticmethod
    def of(call: spec.AlignedCall) -> AlignedCall:
        return AlignedCall(number=call.number, difference=call.difference, left=_of(call.left), right=_of(call.right))


class ComparedBranch(Answer):
    """How one side came out. Counts and times are those after the fork point."""

    ref: str
    head: Snapshot
    name: str | None
    status: str = Field(description="`in the past`: the ref is a snapshot, and not its trajectory's head.")
    exit_code: int | None
    call_count: int
    failed: int = Field(description="Calls that failed.")
    seconds: float
    tokens: list[int] = Field(description="In and out, of model calls that reported them.")
    added: int
    changed: int
    deleted: int

    @staticmethod
    def of(one: spec.ComparedBranch) -> ComparedBranch:
        return ComparedBranch(
            ref=one.ref,
            head=Snapshot.of(one.head),
            name=one.name,
            status=one.status,
            exit_code=one.exit_code,
            call_count=one.calls,
            failed=one.failed,
            seconds=one.seconds,
            tokens=list(one.tokens),
            added=one.added,
            changed=one.changed,
            deleted=one.deleted,
        )


class ComparedPair(Answer):
    """One more side against the first one."""

    first_difference: AlignedCall | None
    calls: list[AlignedCall]
    changes: list[dict[str, Any]] = Field(description="Files of the two heads that differ, as `/diff` has them.")

    @staticmethod
    def of(pair: spec.ComparedPair) -> ComparedPair:
        first = pair.first_difference
        return ComparedPair(
            first_difference=None if first is None else AlignedCall.of(first),
            calls=[AlignedCall.of(call) for call in pair.calls],
            changes=[change_json(change) for change in pair.files],
        )


class Comparison(Answer):
    fork_point: Snapshot | None = Field(description="The last snapshot that all have.")
    branches: list[ComparedBranch]
    pairs: list[ComparedPair] = Field(description="Each further side against the first.")

    @staticmethod
    def of(found: spec.Comparison) -> Comparison:
        return Comparison(
            fork_point=_of(found.fork_point),
            branches=[ComparedBranch.of(one) for one in found.branches],
            pairs=[ComparedPair.of(pair) for pair in found.pairs],
        )


# -- commands in throw-away forks --------------------------------------------------------------------------------------


class _CommandFields(Request):
    argv: list[str] = Field(min_length=1)
    cwd: str | None = Field(None, description="Absolute path in the sandbox; its working directory if null.")
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = Field(None, description="Name or number, optionally with `:group`.")

    def words(self) -> tuple[str, ...]:
        check_argv(tuple(self.argv))
        return tuple(self.argv)


class ScorerFields(_CommandFields):
    """A command, and how its score is read: from its exit code (1 for 0, else 0) unless said otherwise."""

    number: bool = Field(False, description="The score is the last line of standard output that is a number.")
    junit: str | None = Field(
        None, description="The score is the share of passed tests in the report that the run leaves at this path."
    )
    files_b64: str | None = Field(
        None,
        description=f"A tar of at most {FILES_MAX_BYTES >> 20} MiB whose content only the fork has. Needs `sh` and `tar` in the "
        "image.",
    )
    files_path: str | None = Field(
        None, description=f"Its place in the fork, in place of anything there; {SCORER_PATH} if null."
    )
    timeout_s: float | None = Field(
        None, gt=0, le=TIMEOUT_MAX_S, allow_inf_nan=False, description="A run that takes longer has no score."
    )

    def scorer(self) -> spec.Scorer:
        return spec.Scorer(
            argv=self.words(),
            number=self.number,
            report=self.junit,
            files=_files(self.files_b64),
            where=self.files_path,
            cwd=self.cwd,
            env=environment(self.env),
            user=self.user,
            timeout_s=self.timeout_s,
        )


class ScoreRequest(ScorerFields):
    refs: list[str] = Field(min_length=1, max_length=QUEUE_MAX, description="A trajectory stands for its head.")
    each: bool = Field(False, description="All snapshots of the trajectories, in place of their heads.")
    repeat: int = Field(1, ge=1, le=REPEAT_MAX, description="Runs of each.")
    parallel: int | None = Field(None, ge=1, le=QUEUE_MAX, description="Runs at once; null: as many as processors.")

    def request(self) -> spec.ScoreRequest:
        return spec.ScoreRequest(tuple(self.refs), self.scorer(), self.each, self.repeat, self.parallel)


class BisectRequest(_CommandFields):
    ref: str
    good: str | None = Field(None, description="A snapshot where the command passes; null: the first one.")
    bad: str | None = Field(None, description="A snapshot where it fails; null: the head.")
    parallel: int = Field(1, ge=1, le=256, description="Snapshots tried at once.")
    repeat: int = Field(1, ge=0, le=REPEAT_MAX, description="Times to run the border again.")

    def request(self) -> spec.BisectRequest:
        good, bad = (None if ref is None else check_ref(ref) for ref in (self.good, self.bad))
        return spec.BisectRequest(
            ref=check_ref(self.ref),
            argv=self.words(),
            good=good,
            bad=bad,
            parallel=self.parallel,
            repeat=self.repeat,
            cwd=self.cwd,
            env=environment(self.env),
            user=self.user,
        )


def scored_json(row: spec.SnapshotScores, run: ScoredRun) -> Json:
    """One run, and the snapshot that it scored."""
    return {"ref": row.ref, "snapshot": _of(row.snapshot), "run": dataclasses.asdict(run)}


def row_json(row: spec.SnapshotScores) -> Json:
    """A scored snapshot: its place, its runs and their statistics."""
    return {
        "ref": row.ref,
        "snapshot": _of(row.snapshot),
        **row.statistics(),
        "error": row.error,
        "runs": [dataclasses.asdict(run) for run in row.runs],
    }


def tried_json(tried: spec.Tried) -> Json:
    return {
        "snapshot": Snapshot.of(tried.snapshot),
        "round": tried.round,
        "outcome": tried.outcome,
        "exit_code": tried.exit_code,
    }


def bisection_json(found: spec.Bisection) -> Json:
    return {
        "first_bad": Snapshot.of(found.first_bad),
        "last_good": Snapshot.of(found.last_good),
        "unknown": [Snapshot.of(one) for one in found.unknown],
        "rounds": found.rounds,
        "flaky": found.flaky,
    }


def _files(text: str | None) -> bytes | None:
    """The tar that a request brings. UsageError, LimitExceeded."""
    if text is None:
        return None
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError(f"the scorer's files are not base64 ({exc}); encode a tar of them") from exc
    if len(data) > FILES_MAX_BYTES:
        raise LimitExceeded(f"the scorer's files have {len(data)} bytes as a tar, and {FILES_MAX_BYTES} is the most")
    return data


# -- experiments -------------------------------------------------------------------------------------------------------


class SpendingFields(Request):
    """Most that may be used; null: no limit."""

    seconds: _Positive | None = None
    calls: int | None = Field(None, ge=1, le=QUEUE_MAX)
    tokens: _Positive | None = Field(None, description="In and out.")
    cost: _Positive | None = Field(None, description="In the unit of the prices.")

    def spending(self) -> spec.Spending:
        return spec.Spending(self.seconds, self.calls, self.tokens, self.cost)


class PriceFields(Request):
    """Prices of a million tokens."""

    input: float = Field(0.0, ge=0, lt=1e15, allow_inf_nan=False)
    output: float = Field(0.0, ge=0, lt=1e15, allow_inf_nan=False)


class ExperimentRequest(Request):
    name: str = Field(description="Its branches are trajectories called NAME.LABEL.RUN.")
    source: str | SandboxFields = Field(
        description="The snapshot that all branches begin at, or a new sandbox, which is called NAME.base."
    )
    variants: list[VariantFields] = Field(
        min_length=1, max_length=QUEUE_MAX, description="As those of a fork, without names."
    )
    args: list[str] | None = Field(None, description="Start the program in each branch with these, as in a fork.")
    resume: bool = Field(False, description="The program goes on from the source.")
    repeat: int = Field(1, ge=1, le=QUEUE_MAX, description="Runs of each variant.")
    parallel: int | None = Field(
        None, ge=1, le=QUEUE_MAX, description="Branches at once; null: as many as fit into the free memory."
    )
    protected: list[str] = Field(
        default_factory=list, max_length=1000, description="A branch that changes something below these does not pass."
    )
    score: ScorerFields = Field(description=f"Its `timeout_s` is {SCORE_TIMEOUT_S:g} if null.")
    first_pass: bool = Field(False, description="End when one branch passed.")
    best_of: int | None = Field(None, ge=1, le=QUEUE_MAX, description="End when so many branches are scored.")
    stop: SpendingFields | None = Field(None, description="Of all branches together.")
    budget: SpendingFields | None = Field(None, description="Of each branch.")
    prices: PriceFields | None = None

    def request(self, namespace_pid: int) -> spec.ExperimentRequest:
        """UsageError names the malformed part. `namespace_pid`: as in `SandboxRequest`."""
        source, variants = self.source, tuple(one.variant() for one in self.variants)
        if (named := next((one for one in variants if one.name is not None), None)) is not None:
            raise UsageError(
                f"the variant {named.label} has a name, but an experiment names its branches; leave it out"
            )
        if isinstance(source, SandboxFields) and source.name is not None:
            raise UsageError("an experiment names the sandbox that it begins from; leave the name out")
        args = None if self.args is None else tuple(self.args)
        check_argv(args or ())
        scorer = self.score.scorer()
        return spec.ExperimentRequest(
            name=self.name,
            source=check_ref(source)
            if isinstance(source, str)
            else dataclasses.replace(source.sandbox(), namespace_pid=namespace_pid),
            variants=variants,
            scorer=scorer if scorer.timeout_s is not None else dataclasses.replace(scorer, timeout_s=SCORE_TIMEOUT_S),
            args=args,
            resume=self.resume,
            repeat=self.repeat,
            parallel=self.parallel,
            protected=tuple(self.protected),
            first_pass=self.first_pass,
            best_of=self.best_of,
            stop=spec.Spending() if self.stop is None else self.stop.spending(),
            budget=spec.Spending() if self.budget is None else self.budget.spending(),
            prices=(0.0, 0.0) if self.prices is None else (self.prices.input, self.prices.output),
        )


class ExperimentBranch(Answer):
    """One run of a variant."""

    label: str
    run: int
    status: Literal["waiting", "running", "scored", "failed", "stopped", "skipped"] = Field(
        description="`failed`: without a score, `error` says why; `stopped`, `skipped`: the experiment ended while it ran, or before."
    )
    trajectory: str | None
    error: str | None
    score: float | None
    passed: bool = Field(description="The score's command passed, and no protected path changed.")
    exit_code: int | None
    seconds: float
    call_count: int
    tokens: list[int]
    cost: float
    file_count: int = Field(description="Of the workspace, that differ from the source.")
    line_count: int
    outside: int = Field(description="Files elsewhere that differ.")
    protected: list[str] = Field(description="Changed paths below protected ones.")


class VariantAnswer(Answer):
    """The runs of one variant that have ended."""

    label: str
    rank: int | None
    score: float | None = Field(description="The mean.")
    standard_error: float | None
    passes: int
    pass_at: dict[str, float] = Field(description="Probability that one of so many runs passes.")


class Experiment(Answer):
    name: str
    snapshot: str
    started_at: str
    ended_because: str | None = Field(description="Why no other branch begins; null while some may.")
    best: str | None = Field(description="LABEL.RUN of the branch to promote.")
    variants: list[VariantAnswer] = Field(description="The highest mean first.")
    branches: list[ExperimentBranch]

    @staticmethod
    def of(info: ExperimentInfo) -> Experiment:
        return Experiment.model_validate(info.json())
