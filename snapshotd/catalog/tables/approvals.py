"""Approvals and compensations in the catalog's database."""

from __future__ import annotations

import builtins
import json
from collections.abc import Sequence
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row, Value
from snapshotd.catalog.lookup import (
    CANDIDATES,
    check_unique,
    id_range,
    no_such,
    searchable,
    snapshot_numbers,
    trajectory_number,
)
from snapshotd.catalog.tenancy import own_condition
from snapshotd.errors import Conflict, InternalError, NotFound
from snapshotd.types import (
    Approval,
    ApprovalID,
    ApprovalStatus,
    CallID,
    CallStatus,
    Compensation,
    SideEffect,
    TrajectoryID,
    short,
)

_APPROVAL_SELECT = """
SELECT a.id, t.id, a.entry, a.tool, a.digest, s.id, a.side_effect, a.created_at_ns, a.question, a.status, a.expires_at_ns,
       a.decided_at_ns, a.decided_by, a.reason, a.edited, a.arguments
FROM approvals a JOIN trajectories t ON t.pk = a.trajectory JOIN snapshots s ON s.pk = a.snapshot
"""
_APPROVAL_INSERT = """
INSERT INTO approvals (id, trajectory, snapshot, entry, tool, digest, side_effect, created_at_ns, question, status, expires_at_ns,
    decided_at_ns, decided_by, reason, edited, arguments)
VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
"""
_COMPENSATION_SELECT = """
SELECT c.entry, t.id, c.status, c.began_at_ns, c.ended_at_ns, c.exit_code, c.error
FROM compensations c JOIN trajectories t ON t.pk = c.trajectory WHERE
"""


class ApprovalTable:
    """Questions to a person, and the decisions. They go with their trajectory."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def add(self, approval: Approval) -> None:
        """Record an approval. Conflict: the id exists. NotFound: its trajectory or snapshot."""
        with self._db.transaction():
            if self._db.read("SELECT 1 FROM approvals WHERE id = ?", (approval.id,)):
                raise Conflict(f"approval {approval.id} is in the catalog already: every question has an id of its own")
            _add_approval(self._db, approval)

    def list(
        self, status: ApprovalStatus | None = None, trajectory_id: TrajectoryID | None = None
    ) -> builtins.list[Approval]:
        """Oldest first."""
        where, values = _where({"a.status": status and status.value, "t.id": trajectory_id})
        return [_decode(row) for row in self._db.read(f"{_APPROVAL_SELECT} {where} ORDER BY a.pk", values)]

    def find(self, ref: str) -> Approval:
        """The approval of this unique id prefix (>= 4 characters), of a trajectory that the present tenant sees. NotFound, Ambiguous."""
        found: builtins.list[Row] = []
        if ref and searchable(ref):
            condition, values = own_condition()
            found = self._db.read(
                _APPROVAL_SELECT + f"WHERE a.id >= ? AND a.id < ? AND {condition} LIMIT ?",
                (*id_range(ref), *values, CANDIDATES + 1),
            )
        if not found:
            raise no_such("approval", ref)
        check_unique(ref, [row[0] for row in found])
        return _decode(found[0])

    def of_entry(self, trajectory_id: TrajectoryID, entry_id: CallID) -> Approval | None:
        """The latest approval that was asked for a call of a trajectory."""
        where, newest = "WHERE a.entry = ? AND t.id = ?", "ORDER BY a.pk DESC LIMIT 1"
        row = self._db.read_one(f"{_APPROVAL_SELECT} {where} {newest}", (rows.encode_text(entry_id), trajectory_id))
        return None if row is None else _decode(row)

    def decide(
        self,
        approval_id: ApprovalID,
        status: ApprovalStatus,
        *,
        at_ns: int,
        by: str | None,
        reason: str | None,
        edited: tuple[Any] | None = None,
    ) -> Approval:
        """Pending becomes `status`. Conflict: it was decided already (the message says how and by whom). NotFound."""
        if status is ApprovalStatus.PENDING:
            raise InternalError(f"approval {approval_id} cannot be decided to be pending")
        with self._db.transaction():
            found = self._get(approval_id)
            if found.status is not ApprovalStatus.PENDING:
                who = "" if found.by is None else f" by {ascii(found.by[:80])[1:-1]}"
                raise Conflict(
                    f"approval {short(approval_id)} of {found.tool} is {found.status}{who}; it cannot be decided again"
                )
            self._db.write(
                "UPDATE approvals SET status = ?, decided_at_ns = ?, decided_by = ?, reason = ?, edited = ? WHERE id = ?",
                (
                    status.value,
                    at_ns,
                    rows.encode_text_or_none(by),
                    rows.encode_text_or_none(reason),
                    _encode_edited(edited),
                    approval_id,
                ),
            )
            return self._get(approval_id)

    def move(self, approval_id: ApprovalID, entry_id: CallID) -> None:
        """Bind an approval to another call, under which a resumed program asks the same question again."""
        with self._db.transaction():
            self._get(approval_id)
            self._db.write("UPDATE approvals SET entry = ? WHERE id = ?", (entry_id, approval_id))

    def _get(self, approval_id: ApprovalID) -> Approval:
        row = (
            self._db.read_one(_APPROVAL_SELECT + "WHERE a.id = ?", (approval_id,)) if searchable(approval_id) else None
        )
        if row is None:
            raise no_such("approval", approval_id)
        return _decode(row)


class Compensations:
    """Compensations of irreversible calls, at most one each. A compensation goes with its trajectory; that of an
    ancestor's call stays with the call, and belongs to the ancestor from then on."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def begin(self, compensation: Compensation) -> None:
        """Record that a compensation begins. Conflict: the call has one already, with any outcome."""
        db, one = self._db, compensation
        with db.transaction():
            if db.read("SELECT 1 FROM compensations WHERE entry = ?", (one.entry,)):
                raise Conflict(
                    f"call {short(one.entry)} has been compensated already, or that was begun: look at it with `snapshotd show`"
                )
            _add_compensation(db, one)

    def end(
        self, entry_id: CallID, status: CallStatus, *, at_ns: int, exit_code: int | None, error: str | None
    ) -> None:
        """Record how the open compensation of a call ended. NotFound: none is open."""
        with self._db.transaction():
            if not self._db.write(
                "UPDATE compensations SET status = ?, ended_at_ns = ?, exit_code = ?, error = ? WHERE entry = ? AND status IS NULL",
                (status.value, at_ns, exit_code, rows.encode_text_or_none(error), rows.encode_text(entry_id)),
            ):
                raise _none_open(entry_id)

    def forget(self, entry_id: CallID) -> None:
        """Forget the open compensation of a call: it has done nothing, so another may begin. NotFound: none is open."""
        with self._db.transaction():
            if not self._db.write(
                "DELETE FROM compensations WHERE entry = ? AND status IS NULL", (rows.encode_text(entry_id),)
            ):
                raise _none_open(entry_id)

    def get(self, entry_id: CallID) -> Compensation | None:
        row = self._db.read_one(f"{_COMPENSATION_SELECT} c.entry = ?", (rows.encode_text(entry_id),))
        return None if row is None else _decode_compensation(row)

    def of_trajectory(self, trajectory_id: TrajectoryID) -> list[Compensation]:
        """All of a trajectory."""
        found = self._db.read(f"{_COMPENSATION_SELECT} t.id = ? ORDER BY c.entry", (trajectory_id,))
        return [_decode_compensation(row) for row in found]


def _decode_compensation(row: Row) -> Compensation:
    with rows.intact("the compensation of call", row):
        entry, trajectory, status, began, ended, exit_code, error = row
        return Compensation(
            CallID(entry),
            TrajectoryID(trajectory),
            None if status is None else CallStatus(status),
            began,
            ended,
            exit_code,
            rows.decode_text_or_none(error),
        )


def replace_approvals(db: CatalogDatabase, approvals: Sequence[Approval]) -> None:
    """Replace approvals by the given ones, inside a transaction of the caller. An approval of a snapshot that is not here is
    left out."""
    for one in approvals:
        if db.read("SELECT 1 FROM snapshots WHERE id = ?", (one.snapshot,)):
            db.write("DELETE FROM approvals WHERE id = ?", (one.id,))
            _add_approval(db, one)


def replace_compensations(db: CatalogDatabase, compensations: Sequence[Compensation]) -> None:
    """Replace compensations by the given ones, inside a transaction of the caller."""
    for one in compensations:
        db.write("DELETE FROM compensations WHERE entry = ?", (one.entry,))
        _add_compensation(db, one)


def _add_approval(db: CatalogDatabase, one: Approval) -> None:
    db.write(
        _APPROVAL_INSERT,
        (
            one.id,
            trajectory_number(db, one.trajectory),
            snapshot_numbers(db, one.snapshot)[0],
            one.entry,
            rows.encode_text(one.tool),
            one.digest,
            one.side_effect.value,
            one.created_at_ns,
            rows.encode_text_or_none(one.question),
            one.status.value,
            one.expires_at_ns,
            one.decided_at_ns,
            rows.encode_text_or_none(one.by),
            rows.encode_text_or_none(one.reason),
            _encode_edited(one.edited),
            rows.encode_json(one.arguments),
        ),
    )


def _add_compensation(db: CatalogDatabase, one: Compensation) -> None:
    db.write(
        "INSERT INTO compensations VALUES (?,?,?,?,?,?,?)",
        (
            one.entry,
            trajectory_number(db, one.trajectory),
            None if one.status is None else one.status.value,
            one.began_at_ns,
            one.ended_at_ns,
            one.exit_code,
            rows.encode_text_or_none(one.error),
        ),
    )


def _none_open(entry_id: CallID) -> NotFound:
    return NotFound(f"no compensation of call {ascii(entry_id[:80])[1:-1]} is open: begin one first")


def _where(wanted: dict[str, Value]) -> tuple[str, builtins.list[Value]]:
    given = {column: value for column, value in wanted.items() if value is not None}
    return ("WHERE " + " AND ".join(f"{column} = ?" for column in given) if given else ""), [*given.values()]


def _encode_edited(edited: tuple[Any] | None) -> str | None:
    return None if edited is None else rows.encode_json(edited[0])


def _decode(row: Row) -> Approval:
    with rows.intact("approval", row):
        approval_id, trajectory, entry, tool, digest, snapshot, side_effect, created = row[:8]
        question, status, expires, decided, by, reason, edited, arguments = row[8:]
        return Approval(
            approval_id,
            trajectory,
            entry,
            rows.decode_text(tool),
            json.loads(arguments),
            digest,
            snapshot,
            SideEffect(side_effect),
            created,
            rows.decode_text_or_none(question),
            ApprovalStatus(status),
            expires,
            decided,
            rows.decode_text_or_none(by),
            rows.decode_text_or_none(reason),
            None if edited is None else (json.loads(edited),),
        )
