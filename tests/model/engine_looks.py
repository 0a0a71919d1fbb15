"""The walk's looks: a snapshot restored, compared, read, and entered; and the refusal of those that have no files."""
# ruff: noqa: PT017 - errors are expected of what has no files

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshotd.errors import DataLoss, NotFound, SnapshotdError
from tests.model.engine_oracle import INSIDE, Line, Listing, Taken, changes, host_listing, inside_view, parse_inside

if TYPE_CHECKING:
    from tests.model.engine_machine import Machine


class Looks:
    """See the module's text."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._client, self._world = machine, machine.client, machine.world

    def check_cat(self, item: Taken) -> None:
        paths = [path for path in item.tree.names if item.tree.node(path).kind == "f"]
        if paths:
            path = self._machine.rng.choice(paths)
            assert b"".join(self._client.cat(item.id, f"/workspace/{path}".encode())) == item.tree.node(path).data, path

    def restored(self) -> None:
        if not self._machine.readable():
            return
        item = self._machine.any_readable()
        self._machine.note(f"restore {item.id[:12]} ({item.state})")
        self.check_cat(item)
        self.check_restored(item)

    def check_restored(self, item: Taken) -> None:
        target = self._machine.folder / "restored"
        report = self._machine.patient(lambda: self._client.restore(item.id, target, path="/workspace"))
        try:
            listing, times = host_listing(target)
        finally:
            shutil.rmtree(target)
        same(*self._machine.manner.outside(listing, item.tree.listing()), f"restored {item.id} ({item.state})")
        self._machine.past.check_mind(item)
        assert report.warnings == ()
        if item.times is not None:
            wrong = {path: (times[path], ns) for path, ns in item.times.items() if times[path] != ns}
            assert not wrong, f"times of {item.id} changed: {wrong}"
        item.times = times

    def compared(self) -> None:
        if len(self._machine.readable()) < 2:
            return
        a, b = self._machine.any_readable(), self._machine.any_readable()
        self._machine.note(f"diff {a.id[:12]} {b.id[:12]}")
        said = {(c.change, c.path[11:]) for c in self._client.diff(a.id, b.id) if c.path.startswith("/workspace/")}
        same_sets(said, changes(a.tree.listing(), b.tree.listing()))

    def inside(self) -> None:
        """A throw-away fork, looked at from the inside."""
        if not self._machine.readable():
            return
        item = self._machine.any_readable()
        self._machine.note(f"look into {item.id[:12]} from the inside")
        code, printed = self._machine.patient(lambda: self.look(self._client.exec_snapshot, item.id))
        assert code == 0, printed
        same(parse_inside(printed), inside_view(item.tree.listing()), f"inside {item.id}")

    def look(self, execute: Callable[..., Any], ref: str) -> tuple[int, bytes]:
        printed: dict[str, bytes] = {"stdout": b"", "stderr": b""}

        def sink(stream: str, data: bytes) -> None:
            printed[stream] += data

        done = execute(ref, ["perl", "-e", INSIDE], cwd="/workspace", env={"LC_ALL": "C"}, on_output=sink)
        return done.exit_code, printed["stdout"] if done.exit_code == 0 else printed["stderr"]

    def check_inside(self, line: Line) -> None:
        code, printed = self.look(self._client.exec, line.id)
        line.running = True
        self._machine.sync(line, {"exec": line.tree})
        assert code == 0, printed
        same(parse_inside(printed), inside_view(line.tree.listing()), f"inside {line.id}")

    def check_running(self, line: Line) -> None:
        """Every directory of the running root, as a program in it lists it: a name that cannot be looked up is an
        error."""
        if not self._machine.manner.seen_from_outside:
            return
        (pid,) = [sandbox.pid for sandbox in self._client.sandboxes() if sandbox.trajectory.id == line.id]
        found, _ = host_listing(Path(f"/proc/{pid}/root/workspace"))
        same(_contents(found), _contents(line.tree.listing()), f"the running root of {line.id}")

    def refused(self) -> None:
        """What has no files cannot be read or started, and says why."""
        without = [item for item in self._world.snapshots.values() if not item.readable]
        if not without:
            return
        item = self._machine.rng.choice(without)
        kind: type[SnapshotdError] = NotFound if item.state == "pruned" else DataLoss
        self._machine.note(f"{item.state} {item.id[:12]} is refused")
        works: list[Callable[[], object]] = [
            lambda: b"".join(self._client.cat(item.id, "/etc/passwd")),
            lambda: self._client.fork(item.id),
            lambda: self._client.restore(item.id, self._machine.folder / "refused"),
            lambda: self._client.exec_snapshot(item.id, ["true"]),
        ]
        try:
            self._machine.rng.choice(works)()
        except kind as exc:
            assert "given up" in exc.message or "lost" in exc.message, exc
        else:
            raise AssertionError("it was read all the same")
        assert self._client.snapshot(item.id).id == item.id, "its call is still there"


def _contents(listing: Listing) -> dict[str, tuple[Any, ...]]:
    """Kinds and contents alone: owners are shifted outside of a sandbox, and `check_inside` compares the rest."""
    return {path: (entry[0], entry[4]) for path, entry in listing.items()}


def same(found: dict[str, Any], wanted: dict[str, Any] | Listing, what: str) -> None:
    if found != wanted:
        wrong = {
            path: (_short(found.get(path)), _short(wanted.get(path)))
            for path in found.keys() | wanted.keys()
            if found.get(path) != wanted.get(path)
        }
        raise AssertionError(f"{what}: (found, wanted) of {wrong}")


def _short(value: Any) -> str:
    return repr(value)[:300]


def same_sets(found: set[tuple[str, str]], wanted: set[tuple[str, str]]) -> None:
    assert found == wanted, f"too many: {found - wanted}; missing: {wanted - found}"
