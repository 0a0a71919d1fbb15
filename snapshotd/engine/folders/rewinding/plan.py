"""The history of the paths of a folder since a snapshot, and the changes that a rewind may make therefore.

Each snapshot of a folder notes whose changes it holds, path by path: those of sessions of an agent (`made`), and those
of others (`edited`). The state of a path before a rewind is what the last of these changes left, since the folder is
recorded first. So a rewind takes a path back where all changes since are of the sessions that it was asked for.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.databases import groups, log_in
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.rewinding.putting_back import relative
from snapshotd.engine.markers import is_marker
from snapshotd.engine.storage import look
from snapshotd.errors import Conflict, NotFound, SnapshotdError
from snapshotd.terms import number_of
from snapshotd.trees import diff
from snapshotd.trees.base import Change
from snapshotd.trees.view import View
from snapshotd.types import Snapshot, Trajectory, short

PERSON = ""
"""Owner of a change that no agent has made, or none that is known."""
REWIND = "\0rewind"
"""Owner of a change by a rewind that was recorded without its sessions."""
ALL = "all"
"""Names all sessions, where one is asked for."""
_MOST_PLAIN = 2000
KEY = "changes"
"""Where the state of a snapshot has them, beside its `values`."""


@dataclass(slots=True)
class FolderChanges:
    """The changes of one snapshot, by names (`name_of`). A path may have several owners. `moved`: the old and the new
    name of each file that was renamed."""

    made: dict[str, set[str]] = field(default_factory=dict)
    edited: set[str] = field(default_factory=set)
    moved: set[tuple[str, str]] = field(default_factory=set)

    def add(self, owners: Iterable[str], path: bytes) -> None:
        """Note owners of a path."""
        for owner in owners:
            (self.edited if owner == PERSON else self.made.setdefault(owner, set())).add(name_of(path))

    def replace(self, owners: Iterable[str], path: bytes) -> None:
        """Note other owners of a path."""
        for names in (self.edited, *self.made.values()):
            names.discard(name_of(path))
        self.add(owners, path)

    def owners(self, path: bytes) -> set[str]:
        """The owners of a path."""
        name = name_of(path)
        made = {owner for owner, names in self.made.items() if name in names}
        return made | ({PERSON} if name in self.edited else set())

    def record(self, seq: int) -> dict[str, Any]:
        """The form for the state of the snapshot with this number."""
        content: dict[str, Any] = {
            "made": {key: sorted(names) for key, names in self.made.items()},
            "edited": sorted(self.edited),
            "moved": sorted(self.moved),
        }
        if sum(map(len, (*self.made.values(), self.edited))) <= _MOST_PLAIN:
            return {"seq": seq, **content}
        return {"seq": seq, "packed": base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()}

    @staticmethod
    def of(record: dict[str, Any]) -> FolderChanges:
        if "packed" in record:
            record = {**record, **json.loads(zlib.decompress(base64.b64decode(record["packed"])))}
        made = {key: set(names) for key, names in record["made"].items()}
        return FolderChanges(made, set(record["edited"]), {(old, new) for old, new in record["moved"]})


def changes_of(context: Context, snapshot: Snapshot) -> FolderChanges | None:
    """The changes of a snapshot; those of an older snapshot, which noted none, as its trees show them. None: they are
    not known."""
    catalog = context.catalog
    noted = (catalog.conversations.own_state(snapshot.id) or {}).get(KEY)
    if noted is not None and noted.get("seq") == snapshot.seq:
        return FolderChanges.of(noted)
    own = catalog.journal.own(snapshot.id)
    is_agents = bool(own) or "files" in snapshot.call.arguments
    listed = (own[0].details if own else snapshot.call.arguments).get("files") if is_agents else None
    names = set(listed) if listed is not None else _compare_trees(context, catalog, snapshot)
    if names is None:
        return None
    if not is_agents:
        return FolderChanges(edited=names)
    return FolderChanges({str(own[0].details.get("session") or "unnamed") if own else REWIND: names})


def _compare_trees(context: Context, catalog: Catalog, snapshot: Snapshot) -> set[str] | None:
    if snapshot.parent is None or not snapshot.own_layers:
        return set()
    try:
        before, after = look.open_pair(context, catalog.snapshots.get(snapshot.parent), snapshot)
    except SnapshotdError:
        return None
    with before, after:
        try:
            return {name_of(relative(change)) for change in diff.diff(before, after, TOP)}
        except FileNotFoundError:
            return set()


@dataclass(slots=True)
class History:
    """The owners of each path that was changed since a snapshot. `whole` False: the owners of some changes are not
    known."""

    owners: dict[str, set[str]] = field(default_factory=dict)
    whole: bool = True
    moved: list[tuple[str, str]] = field(default_factory=list)
    _before: dict[str, str] = field(default_factory=dict)
    """Each session that continues another one, to that one."""

    @staticmethod
    def since(context: Context, trajectory: Trajectory, seq: int) -> History:
        """The changes of the snapshots after a number."""
        found = History()
        for snapshot in context.catalog.snapshots.of_trajectory(trajectory.id):
            if is_marker(context.catalog, snapshot, ("rewind", "undo")) and "continues" in snapshot.call.arguments:
                new, old = snapshot.call.arguments["continues"]
                found._before[new] = old
            if snapshot.seq <= seq:
                continue
            changes = changes_of(context, snapshot)
            if changes is None:
                found.whole = False
                continue
            found.add(changes)
        return found

    def add(self, changes: FolderChanges) -> None:
        """Count these, too."""
        self.moved += changes.moved
        for owner, names in ((PERSON, changes.edited), *changes.made.items()):
            for name in names:
                self.owners.setdefault(name, set()).add(owner)

    def first_of(self, session: str) -> str:
        """The first session of a line of sessions, in which each continues the one before."""
        seen = set()
        while session in self._before and session not in seen:
            seen.add(session)
            session = self._before[session]
        return session

    def sessions(self) -> dict[str, int]:
        """The lines of sessions that have changed paths, each with their number."""
        counts: dict[str, int] = {}
        for owners in self.owners.values():
            for one in {self.first_of(owner) for owner in owners - {PERSON, REWIND}}:
                counts[one] = counts.get(one, 0) + 1
        return counts

    def choose_owners(self, session: str | None, to: Snapshot) -> set[str]:
        """Choose the owners whose changes are taken back. NotFound: the session has none. Conflict: `session` is None,
        and several have some."""
        counts = self.sessions()
        everybody = {owner for owners in self.owners.values() for owner in owners} - {PERSON}
        if session is not None and session != ALL:
            wanted = self.first_of(session)
            if wanted not in counts:
                there = ", ".join(sorted(counts)) or "none has"
                raise NotFound(
                    f"session {session[:80]} has changed nothing since {short(to.id)}; sessions that have: {there}"
                )
            return {owner for owner in everybody if self.first_of(owner) == wanted}
        if session is None and len(counts) > 1:
            told = " and ".join(f"{one} ({number_of(count, 'path')})" for one, count in sorted(counts.items()))
            raise Conflict(
                f"{number_of(len(counts), 'session')} have changed files since {short(to.id)}: {told}; name the session whose "
                f"changes go back, or {ALL} for those of all"
            )
        return everybody


@dataclass(slots=True)
class RewindPlan:
    """`changes`: the changes that a rewind makes; `owners`: the owners of each. `left`: paths that agents have changed
    and that stay, each with the reason."""

    changes: list[Change] = field(default_factory=list)
    owners: dict[bytes, set[str]] = field(default_factory=dict)
    left: dict[bytes, str] = field(default_factory=dict)


def plan(before: View, after: View, history: History, chosen: set[str], ignored: Iterable[str]) -> RewindPlan:
    """The changes from one tree to the other that are the chosen owners' alone. `ignored`: paths of the folder that no
    snapshot holds."""
    found = RewindPlan()
    try:
        changes = [change for change in diff.diff(before, after, TOP) if relative(change)]
    except FileNotFoundError:
        return found
    for change in changes:
        path = relative(change)
        owners = history.owners.get(name_of(path), set())
        if not owners & chosen:
            continue
        reason = (
            _find_reason(owners - chosen) if history.whole else "somebody may have changed it since; it is not known"
        )
        if reason is None:
            found.changes.append(change)
            found.owners[path] = owners
        else:
            found.left[path] = reason
    _keep_databases_whole(found, set(ignored))
    _keep_moved_files(found, history, chosen)
    return found


def _find_reason(owners: set[str]) -> str | None:
    sessions = sorted(owners - {PERSON})
    if PERSON in owners:
        return "somebody else has changed it since, too"
    return f"session {', '.join(sessions)} has changed it since, too" if sessions else None


def _keep_databases_whole(found: RewindPlan, ignored: set[str]) -> None:
    """Take a database and its log back together or not at all: a log of another moment damages it."""
    paths = [relative(change) for change in found.changes]
    for base, group in groups([*paths, *found.left]).items():
        log, reason = log_in(os.fsdecode(base), ignored), None
        if log is not None:
            reason = f"the database has a log, {name_of(os.fsencode(log))}, which is ignored, so no snapshot has it"
        elif len(group) > 1 and any(path in found.left for path in group):
            reason = "another file of the same database stays"
        if reason is not None:
            found.left |= {path: reason for path in group if path not in found.left}
    found.changes = [change for change in found.changes if relative(change) not in found.left]


def _keep_moved_files(found: RewindPlan, history: History, chosen: set[str]) -> None:
    """Leave a renamed file where it is, unless all its names are the chosen owners' alone: taking back one name and not
    the other would lose its content."""
    groups: dict[str, set[str]] = {}
    for pair in history.moved:
        group = groups.get(pair[0], {pair[0]}) | groups.get(pair[1], {pair[1]})
        groups |= dict.fromkeys(group, group)
    stays = {name_of(path) for path in found.left}
    for change in list(found.changes):
        path = relative(change)
        others = groups.get(name_of(path), set()) - {name_of(path)}
        reason = next((one for one in sorted(others) if one in stays or history.owners.get(one, set()) - chosen), None)
        if reason is not None:
            found.left[path] = f"a file had this name and {reason}, which somebody else has changed since, too"
    found.changes = [change for change in found.changes if relative(change) not in found.left]


def describe_left(left: dict[bytes, str]) -> list[str]:
    """A sentence for each path that stays."""
    return [f"{name_of(path)} stays as it is: {reason}" for path, reason in sorted(left.items())]
