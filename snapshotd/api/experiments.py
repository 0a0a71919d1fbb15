"""Comparisons, scores, bisections and experiments."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from snapshotd.api.operation import READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, Request, field, record
from snapshotd.api.snapshots import ChangeInfo, SnapshotInfo
from snapshotd.api.trajectories import SandboxFields, VariantFields
from snapshotd.api.wire import LINES, PARALLEL_MAX, QUEUE_MAX, REPEAT_MAX, TIMEOUT_MAX_S

Difference = Literal["same", "arguments", "outcome", "left", "right"]
"""How two aligned calls differ. `left`, `right`: only the first, or only the second side has the call."""
Outcome = Literal["good", "bad", "untestable"]
Limit = Annotated[float, Bounds(gt=0, lt=1e15, allow_inf_nan=False)]
Price = Annotated[float, Bounds(ge=0, lt=1e15, allow_inf_nan=False)]


# -- comparisons -------------------------------------------------------------------------------------------------------


@record(frozen=True)
class CompareRequest(Request):
    refs: Annotated[tuple[str, ...], Bounds(max_length=256)]
    """Two or more trajectories or snapshots. Each is compared with the first."""


@record(frozen=True)
class AlignedCall(ApiRecord):
    """One row of an alignment."""

    number: int
    """Counts calls from 1 at the beginning of both trajectories, on the first one's side (for a call that is only in the
    second, on its side)."""
    difference: Difference
    """The way in which the two calls differ."""
    left: SnapshotInfo | None
    """A call's snapshot on the first side."""
    right: SnapshotInfo | None
    """A call's snapshot on the other side."""


@record(frozen=True)
class BranchInfo(ApiRecord):
    """How one side came out. Calls, failures and times are those after the fork point; files compare its head with the
    fork point, or with its first snapshot where the sides have none in common. `seconds` begin at the fork point for the
    trajectory that went on from it, and for a fork when it was made."""

    ref: str
    head: SnapshotInfo
    name: str | None
    status: str
    """`in the past`: the ref is a snapshot, and not its trajectory's head."""
    exit_code: int | None
    call_count: int
    failed: int
    """Calls that failed."""
    seconds: float
    tokens: tuple[int, int]
    """Tokens in and out, of model calls that reported them."""
    added: int
    changed: int
    deleted: int
    forked_with: str = ""
    """The changes that its forks began with: messages, files, arguments, ..., in words for people. Empty: none."""


@record(frozen=True)
class PairInfo(ApiRecord):
    """One more side against the first one."""

    first_difference: AlignedCall | None
    """The first call that differs."""
    calls: tuple[AlignedCall, ...]
    """Calls side by side."""
    changes: tuple[ChangeInfo, ...]
    """Files of the two heads that differ."""


@record(frozen=True)
class CompareInfo(ApiRecord):
    """Sides, call by call. `pairs[i]` compares `branches[i + 1]` with `branches[0]`."""

    fork_point: SnapshotInfo | None
    """The last snapshot that all have."""
    branches: tuple[BranchInfo, ...]
    pairs: tuple[PairInfo, ...]
    """Each other side against the first."""


# -- commands in throw-away forks --------------------------------------------------------------------------------------


@record(frozen=True)
class _Trial(Request):
    argv: Annotated[tuple[str, ...], Bounds(min_length=1)]
    cwd: str | None = None
    """Absolute path in the sandbox; its working directory if null."""
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    """Name or number, optionally with `:group`."""


@record(frozen=True)
class ScorerFields(_Trial):
    """A command, and how its score is read: from its exit code (1 for 0, else 0) unless said otherwise."""

    number: bool = False
    """The score is the last line of standard output that is a number."""
    junit: str | None = None
    """The score is the share of passed tests in the report that the run leaves at this path."""
    files_b64: str | None = field(default=None, repr=False)
    """A tar of at most 16 MiB whose content only the fork has. Needs `sh` and `tar` in the image."""
    files_path: str | None = None
    """Its place in the fork, in place of anything there; /tmp/score if null."""
    timeout_s: Annotated[float, Bounds(gt=0, le=TIMEOUT_MAX_S, allow_inf_nan=False)] | None = None
    """A run that takes longer has no score."""


@record(frozen=True)
class ScoreRequest(ScorerFields):
    refs: Annotated[tuple[str, ...], Bounds(min_length=1, max_length=QUEUE_MAX)] = ()
    """A trajectory stands for its head."""
    each: bool = False
    """All snapshots of the trajectories, in place of their heads."""
    repeat: Annotated[int, Bounds(ge=1, le=REPEAT_MAX)] = 1
    """Runs of each."""
    parallel: Annotated[int, Bounds(ge=1, le=QUEUE_MAX)] | None = None
    """Runs at once; null: as many as processors."""


@record(frozen=True)
class BisectRequest(_Trial):
    ref: str = ""
    good: str | None = None
    """A snapshot where the command passes; null: the first one."""
    bad: str | None = None
    """A snapshot where it fails; null: the head."""
    parallel: Annotated[int, Bounds(ge=1, le=256)] = 1
    """Snapshots tried at once."""
    repeat: Annotated[int, Bounds(ge=0, le=REPEAT_MAX)] = 1
    """Times to run the border again."""


@record(frozen=True)
class Tried(ApiRecord):
    """One run: where, which round (0: both ends, the last: the border again), how it ended."""

    snapshot: SnapshotInfo
    round: int
    """Number of the round that the run was of."""
    outcome: Outcome
    """Result of the command: `good`, `bad` or `untestable`."""
    exit_code: int


@record(frozen=True)
class Bisection(ApiRecord):
    """`first_bad` is the snapshot whose call broke it, `last_good` the one before which passed. `unknown` lie between
    them and could not be tested: the call of each may have broken it as well. `rounds` counts those of the search.
    `flaky`: the same snapshot passed in one run and failed in another, or a later one passed again."""

    first_bad: SnapshotInfo
    """The first snapshot where the command fails."""
    last_good: SnapshotInfo
    """The snapshot before `first_bad`, where the command passes."""
    unknown: tuple[SnapshotInfo, ...]
    rounds: int
    """Number of rounds that the search took."""
    flaky: bool
    """True: the command now passes and now fails."""


# -- experiments -------------------------------------------------------------------------------------------------------


@record(frozen=True)
class SpendingFields(Request):
    """Most that may be used; null: no limit."""

    seconds: Limit | None = None
    calls: Annotated[int, Bounds(ge=1, le=QUEUE_MAX)] | None = None
    tokens: Limit | None = None
    """In and out."""
    cost: Limit | None = None
    """In the unit of the prices."""


@record(frozen=True)
class PriceFields(Request):
    """Prices of a million tokens."""

    input: Price = 0.0
    output: Price = 0.0


@record(frozen=True)
class ExperimentRequest(Request):
    name: str
    """Its branches are trajectories called NAME.LABEL.RUN."""
    source: str | SandboxFields
    """The snapshot that all branches begin at, or a new sandbox, which is called NAME.base."""
    variants: Annotated[tuple[VariantFields, ...], Bounds(min_length=1, max_length=QUEUE_MAX)]
    """As those of a fork, without names."""
    score: ScorerFields
    """Its `timeout_s` is 600 if null."""
    args: tuple[str, ...] | None = None
    """Start the program in each branch with these, as in a fork."""
    resume: bool = False
    """The program goes on from the source."""
    repeat: Annotated[int, Bounds(ge=1, le=QUEUE_MAX)] = 1
    """Runs of each variant."""
    parallel: Annotated[int, Bounds(ge=1, le=PARALLEL_MAX)] | None = None
    """Branches at once; null: as many as fit into the free memory."""
    protected: Annotated[tuple[str, ...], Bounds(max_length=1000)] = ()
    """A branch that changes something below these does not pass."""
    first_pass: bool = False
    """End when one branch passed."""
    best_of: Annotated[int, Bounds(ge=1, le=QUEUE_MAX)] | None = None
    """End when so many branches are scored."""
    stop: SpendingFields | None = None
    """The sum for all branches."""
    budget: SpendingFields | None = None
    """The same for each branch."""
    prices: PriceFields | None = None


@record(frozen=True)
class ExperimentBranchInfo(ApiRecord):
    """One run of a variant."""

    label: str
    run: int
    """Number of the run of its variant."""
    status: Literal["waiting", "running", "scored", "failed", "stopped", "skipped"]
    """`failed`: without a score, `error` says why; `stopped`, `skipped`: the experiment ended while it ran, or before."""
    trajectory: str | None
    error: str | None
    score: float | None
    passed: bool
    """True: the score's command passed, and no protected path changed."""
    exit_code: int | None
    seconds: float
    call_count: int
    tokens: tuple[int, int]
    cost: float
    """Cost of the tokens."""
    file_count: int
    """Files of the workspace that differ from the source."""
    line_count: int
    """Number of lines of text that changed."""
    outside: int
    """Files elsewhere that differ."""
    protected: tuple[str, ...]
    """Changed paths below protected ones."""


@record(frozen=True)
class RankedVariant(ApiRecord):
    """The runs of one variant that have ended."""

    label: str
    rank: int | None
    """Place in the ranking, from 1."""
    score: float | None
    """The mean."""
    standard_error: float | None
    """The standard error of the mean."""
    passes: int
    """Number of runs that passed."""
    pass_at: dict[str, float]
    """Probability that one of so many runs passes."""


@record(frozen=True)
class ExperimentState(ApiRecord):
    """An experiment as it is now. `snapshotd.scores.ExperimentInfo` reads it."""

    name: str
    snapshot: str
    started_at: str
    ended_because: str | None
    """Why no other branch begins; null while some may."""
    best: str | None
    """LABEL.RUN of the branch to promote."""
    variants: tuple[RankedVariant, ...]
    """The variants, the highest mean first."""
    branches: tuple[ExperimentBranchInfo, ...]


COMPARE = Operation("POST", "/compare", CompareInfo, READ, "branching", body=CompareRequest, by="experiments")
SCORE = Operation[Any]("POST", "/score", LINES, RUN, "branching", body=ScoreRequest)
BISECT = Operation[Any]("POST", "/bisect", LINES, RUN, "branching", body=BisectRequest)
CREATE_EXPERIMENT = Operation(
    "POST", "/experiments", ExperimentState, RUN, "branching", body=ExperimentRequest, once=True, status=201
)
EXPERIMENTS = Operation("GET", "/experiments", list[ExperimentState], READ, "branching", by="experiments.list")
EXPERIMENT = Operation("GET", "/experiments/{experiment}", ExperimentState, READ, "branching", by="experiments.get")
EXPERIMENT_EVENTS = Operation[Any]("GET", "/experiments/{experiment}/events", LINES, READ, "branching")
STOP_EXPERIMENT = Operation(
    "POST", "/experiments/{experiment}/stop", ExperimentState, RUN, "branching", by="experiments.stop"
)
REMOVE_EXPERIMENT = Operation[None](
    "DELETE", "/experiments/{experiment}", None, RUN, "branching", by="experiments.remove"
)
