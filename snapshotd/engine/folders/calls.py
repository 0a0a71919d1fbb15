"""Calls that have begun and not ended, and whose the changes of a folder are meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.rewinding.plan import PERSON, FolderChanges
from snapshotd.engine.folders.scan import FolderScan
from snapshotd.engine.folders.writers import UNKNOWN, Process, Touches
from snapshotd.kernel.processes import runs


@dataclass(slots=True)
class OpenCall:
    """A call, and the process of its agent (None: it cannot be seen)."""

    event: HookEvent
    agent: Process | None

    @property
    def session(self) -> str:
        return session_of(self.event)

    def has_lost_its_agent(self) -> bool:
        """True once the agent has ended, so that no end of the call will come."""
        return self.agent is not None and not runs(self.agent)


def session_of(event: HookEvent) -> str:
    """The session that an event's changes are noted with."""
    return event.session or "unnamed"


def end_of(calls: Sequence[OpenCall], event: HookEvent) -> OpenCall | None:
    """Find the call that an event ends. None: this daemon was not told of its begin."""
    key = (session_of(event), event.call_id or event.tool)
    return next((one for one in calls if (one.session, one.event.call_id or one.event.tool) == key), None)


def owners_of(who: set[str], sessions: set[str], *, knows: bool, revealed: bool, elsewhere: bool) -> set[str]:
    """The owners of a change while calls of these sessions run. More than one: it may be any's. `who`, `knows`: see
    `Touches`. `revealed`: the file was ignored so far, so it may have been there all along. `elsewhere`: it has names that
    are not looked at."""
    if revealed and knows and not who:
        return {PERSON}
    is_certain = knows and who and UNKNOWN not in who
    owners = who & sessions if is_certain else set(sessions)
    # a process of a session without a call counts as somebody else, as everything between calls does
    if not sessions or revealed or who - sessions - {UNKNOWN} or (elsewhere and knows and not who):
        owners.add(PERSON)
    return owners


@dataclass(slots=True)
class Part:
    """Changes of a scan that belong to one call; `call` None: to no call."""

    call: OpenCall | None
    paths: set[str] = field(default_factory=set)
    changes: FolderChanges = field(default_factory=FolderChanges)
    scan: FolderScan = field(default_factory=FolderScan)


def parts_of(
    scan: FolderScan,
    touches: Touches,
    calls: Sequence[OpenCall],
    closing: OpenCall | None,
    agents: Mapping[str, Process],
) -> list[Part]:
    """The changes of a scan as they are to be recorded, one after the other: those of no call first, those of the call
    that ends last. A directory comes with the first path in it. `agents`: the process of each session."""
    sessions = {one.session for one in calls}
    touches = _with_peers(touches, calls, agents)
    found: dict[int, Part] = {}
    decided: dict[int, set[str]] = {}
    for path in (*scan.changed, *scan.deleted):
        names = scan.names.get(path, [path])
        owners = decided.get(id(names))
        if owners is None:
            owners = owners_of(
                set().union(*(touches.who_touched(os.fsencode(name)) for name in names)),
                sessions,
                knows=touches.knows,
                revealed=not scan.revealed.isdisjoint(names),
                elsewhere=path in scan.elsewhere,
            )
            if len(names) > 1:
                decided[id(names)] = owners
        call = None
        if PERSON not in owners:
            call = closing if closing is not None and closing.session in owners else None
            call = call or next(one for one in reversed(calls) if one.session in owners)
        part = found.setdefault(id(call), Part(call))
        part.paths.add(path)
        part.changes.add(owners, os.fsencode(path))
    for old, new in scan.moved:
        for part in found.values():
            if {old, new} & part.paths:
                part.changes.moved.add((name_of(os.fsencode(old)), name_of(os.fsencode(new))))
    parts = sorted(found.values(), key=lambda part: (part.call is not None, part.call is closing))
    taken: set[str] = set()
    for part in parts:
        wanted = {*part.paths, *(above for path in part.paths for above in _above(path) if above in scan.changed)}
        part.scan = scan.part(wanted - taken)
        taken |= wanted
    return parts


def _with_peers(touches: Touches, calls: Sequence[OpenCall], agents: Mapping[str, Process]) -> Touches:
    """Touches in which the sessions of one process share what it did, since they cannot be told apart."""
    known = {**agents, **{one.session: one.agent for one in calls if one.agent is not None}}
    working: dict[Process, set[str]] = {}
    for one in calls:
        if one.agent is not None:
            working.setdefault(one.agent, set()).add(one.session)
    peers = {session: working[agent] for session, agent in known.items() if agent in working}
    touched, renamed = (
        {path: set().union(*(peers.get(one, {one}) for one in who)) for path, who in seen.items()}
        for seen in (touches.touched, touches.renamed)
    )
    return Touches(touches.knows, touched, renamed)


def _above(path: str) -> Iterable[str]:
    at = path.rfind("/")
    while at > 0:
        yield path[:at]
        at = path.rfind("/", 0, at)
