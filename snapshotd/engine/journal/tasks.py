"""Subtasks of an agent: pure functions over the agent's state (`Sandbox.state`), where they lie under `tasks`, in the
order in which they were declared.

    pending ──▶ in-progress ──▶ completed ──▶ in-progress            (a program may come by again)
       │             ├────────▶ failed ──▶ in-progress, pending      (tried again)
       │             └────────▶ pending                              (put back)
       └──▶ skipped ──▶ pending, in-progress        pending ──▶ completed, failed too: a task may be over before it was seen to begin

A task begins when every task that it depends on has completed. Dependencies name tasks that were declared before it, so
there are no circles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snapshotd.api.history import TaskInfo
from snapshotd.errors import Conflict, LimitExceeded, NotFound, UsageError
from snapshotd.types import SnapshotID

STATUSES = ("pending", "in-progress", "completed", "failed", "skipped")
PENDING, IN_PROGRESS, COMPLETED, FAILED, SKIPPED = STATUSES
MAX_TASKS = 1000
MAX_DEPENDS = 100
MAX_NAME_CHARS = 200
MAX_NOTE_CHARS = 4000

_NEXT = {
    PENDING: {IN_PROGRESS, COMPLETED, FAILED, SKIPPED},
    IN_PROGRESS: {PENDING, COMPLETED, FAILED, SKIPPED},
    COMPLETED: {IN_PROGRESS},
    FAILED: {PENDING, IN_PROGRESS, SKIPPED},
    SKIPPED: {PENDING, IN_PROGRESS},
}


def change(
    state: dict[str, Any], name: str, status: str, depends: Sequence[str] | None, note: str | None, snapshot: SnapshotID
) -> dict[str, Any]:
    """The state with one task declared, or changed; `state` stays as it is. `depends` None: as declared. `snapshot`:
    the head now, which becomes the task's `began` or `ended`. To set the status that a task has is no error.

    UsageError (malformed), NotFound (a dependency that was not declared), Conflict (the status cannot follow the
    present one, or a dependency has not completed), LimitExceeded.
    """
    _check_words(name, status, depends, note)
    tasks = _items(state)
    known = {task["name"]: task for task in tasks}
    old = known.get(name)
    if old is None and len(tasks) >= MAX_TASKS:
        raise LimitExceeded(
            f"cannot declare the task {name!r}: there are {MAX_TASKS} already, which is the most; merge some"
        )
    new = (
        dict(old)
        if old is not None
        else {"name": name, "status": PENDING, "depends": [], "note": None, "began": None, "ended": None}
    )
    if depends is not None and list(depends) != new["depends"]:
        _check_depends(new, depends, known, declared=old is not None)
        new["depends"] = list(depends)
    if note is not None:
        new["note"] = note
    _move(new, status, known, snapshot)
    changed = [new if task["name"] == name else task for task in tasks] if old is not None else [*tasks, new]
    return {**state, "tasks": changed}


def tasks_of(state: dict[str, Any]) -> list[TaskInfo]:
    """The tasks of a state, in the order in which they were declared."""
    return [
        TaskInfo(t["name"], t["status"], tuple(t["depends"]), t["note"], t["began"], t["ended"]) for t in _items(state)
    ]


def find(state: dict[str, Any], name: str) -> TaskInfo:
    """The task of this name. NotFound, naming the tasks that there are."""
    known = tasks_of(state)
    found = next((task for task in known if task.name == name), None)
    if found is None:
        names = ", ".join(repr(task.name) for task in known[:10]) or "none"
        raise NotFound(
            f"there is no task {name[:MAX_NAME_CHARS]!r}; declared are: {names}{', ...' if len(known) > 10 else ''}"
        )
    return found


def dependents(tasks: Sequence[TaskInfo], name: str) -> set[str]:
    """The tasks that depend on one, directly or not; it is not among them itself."""
    found: set[str] = set()
    for task in tasks:  # tasks come after the ones they depend on
        if found.union((name,)).intersection(task.depends):
            found.add(task.name)
    return found


def keep(state: dict[str, Any], tasks: Sequence[TaskInfo]) -> dict[str, Any]:
    """The state with these tasks as they are: in the place of its own versions of them, or at its end."""
    if not tasks:
        return state
    kept = {task.name: _item(task) for task in tasks}
    items = [kept.pop(task["name"], task) for task in _items(state)]
    return {**state, "tasks": [*items, *kept.values()]}


def carry(state: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The state with the differences in values and tasks from `before` to `after` applied."""
    values, old, new = dict(state.get("values", {})), before.get("values", {}), after.get("values", {})
    for key in old.keys() - new.keys():
        values.pop(key, None)
    values.update({key: value for key, value in new.items() if key not in old or old[key] != value})
    known = tasks_of(before)
    changed = keep(state, [task for task in tasks_of(after) if task not in known])
    return {**changed, "values": values} if values or "values" in state else changed


def _item(task: TaskInfo) -> dict[str, Any]:
    words = {"name": task.name, "status": task.status, "depends": list(task.depends), "note": task.note}
    return {**words, "began": task.started_in, "ended": task.ended_in}


def _items(state: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = state.get("tasks", [])
    return found


def _move(task: dict[str, Any], status: str, known: dict[str, dict[str, Any]], snapshot: SnapshotID) -> None:
    name, present = task["name"], task["status"]
    if status == present:
        return
    if status not in _NEXT[present]:
        follow = " or ".join(sorted(_NEXT[present]))
        raise Conflict(
            f"the task {name!r} cannot become {status}: it is {present}, after which only {follow} may follow"
        )
    if status in (IN_PROGRESS, COMPLETED):
        for other in task["depends"]:
            if known[other]["status"] != COMPLETED:
                raise Conflict(
                    f"the task {name!r} cannot begin: it depends on {other!r}, which is {known[other]['status']}"
                )
    if status == IN_PROGRESS:
        task["began"], task["ended"] = snapshot, None
    elif status == PENDING:
        task["began"], task["ended"] = None, None
    else:
        task["began"] = task["began"] or (None if status == SKIPPED else snapshot)
        task["ended"] = snapshot
    task["status"] = status


def _check_words(name: str, status: str, depends: Sequence[str] | None, note: str | None) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise UsageError(f"a task's name must have 1 to {MAX_NAME_CHARS} printable characters, unlike {name[:80]!r}")
    if status not in STATUSES:
        raise UsageError(f"{status[:40]!r} is no status of a task; choose {', '.join(STATUSES)}")
    if depends is not None and (len(depends) > MAX_DEPENDS or len(set(depends)) != len(depends)):
        raise UsageError(f"the task {name!r} must name at most {MAX_DEPENDS} tasks that it depends on, each once")
    if note is not None and len(note) > MAX_NOTE_CHARS:
        raise LimitExceeded(f"the note of the task {name!r} has more than {MAX_NOTE_CHARS} characters; make it shorter")


def _check_depends(
    task: dict[str, Any], depends: Sequence[str], known: dict[str, dict[str, Any]], *, declared: bool
) -> None:
    name = task["name"]
    if task["status"] != PENDING:
        raise Conflict(f"what the task {name!r} depends on cannot be changed any more: it is {task['status']}")
    order = list(known)
    before = set(order[: order.index(name)]) if declared else known.keys()
    for other in depends:
        if other not in before:
            raise NotFound(
                f"the task {name!r} cannot depend on {other[:MAX_NAME_CHARS]!r}, which was not declared before it"
            )
