"""Which sandbox is a trajectory's own, when one ends while another begins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api.trajectories import CreateRequest
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.config import Config
from snapshotd.engine.ownership import ALONE
from snapshotd.engine.runs import launched, sessions
from snapshotd.engine.runs.forks import fork_agent
from snapshotd.engine.runs.resume import Resumes
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.live import Survival
from snapshotd.engine.sandbox.sandbox import SandboxUse, UnsavedMind
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.engine.services.runs import RunService
from snapshotd.errors import Conflict, OutOfSpace
from snapshotd.types import AgentSpec, Snapshot, Trajectory, TrajectoryID, TrajectoryStatus
from tests.records import begin, make_image

LOG: Any = SimpleNamespace(append=lambda _: None)


class FakeSandbox(SimpleNamespace):
    @property
    def closed(self) -> bool:
        return bool(self.use.closed)


class World:
    """Sessions over a real catalog, with sandboxes that hold nothing. `ending`, `waiting`: called while one ends, and
    after."""

    def __init__(self, directory: Path) -> None:
        self.catalog = SqliteCatalog(":memory:")
        image = make_image()
        self.catalog.images.add(image)
        self.trajectory, self.first = begin(image)
        self.catalog.trajectories.add([(self.trajectory, self.first)])
        self.made: list[Any] = []
        self.files = directory / "files"
        self.files.mkdir()
        self.ending: Callable[[], object] = lambda: None
        self.waiting: Callable[[], object] = lambda: None
        context: Any = SimpleNamespace(
            catalog=self.catalog,
            secrecy=SimpleNamespace(of=lambda _: None),
            spool=None,
            config=Config(),
            ownership=ALONE,
            state_dir=directory,
        )
        rest: Any = SimpleNamespace(
            take=None, open=lambda *_: None, submit=lambda *_: None, wait=lambda: self.waiting()
        )
        self.sessions = Sessions(context, cast(Any, self), rest, rest, rest, rest, rest)

    def launch(self, trajectory: Trajectory, head: Snapshot, _: Snapshot | None = None) -> tuple[Any, Any]:
        use: Any = SandboxUse(trajectory.id)
        sandbox = FakeSandbox(
            trajectory=trajectory,
            head=head.id,
            ended=False,
            root=SimpleNamespace(
                changed=False, base=head.id, revive=lambda: None, open_root=lambda: os.open(self.files, os.O_PATH)
            ),
            lock=use.lock,
            writer=TrajectoryWriter(head.id, 0, 0),
            mind=UnsavedMind(),
            container=SimpleNamespace(id="container"),
            survival=Survival(),
            way_out=None,
            refused=(),
            use=use,
        )
        self.made.append(sandbox)
        return sandbox, SimpleNamespace(bind=lambda *_: None)

    def end(self, sandbox: Any) -> None:
        first, sandbox.ended = not sandbox.ended, True
        with sandbox.lock:
            sandbox.use.close()
        if first:
            self.ending()

    def started(self) -> Any:
        return self.sessions.ensure_running(self.trajectory)

    def meanwhile(self) -> None:
        """Somebody runs a command in the trajectory: once."""
        self.ending = self.waiting = lambda: None
        self.started()

    def status(self) -> TrajectoryStatus:
        return self.catalog.trajectories.get(self.trajectory.id).status


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    monkeypatch.setattr(sessions, "is_alive", lambda sandbox: not sandbox.closed)
    monkeypatch.setattr(launched, "record_of", lambda *_: SimpleNamespace(open=lambda: None))
    return World(tmp_path)


def _full(*_: Any) -> Any:
    raise OutOfSpace("the catalog cannot be written because the disk is full")


def _is_known(world: World, sandbox: Any) -> None:
    trajectory = world.trajectory.id
    assert world.sessions.live() == [sandbox]
    assert not sandbox.ended
    assert world.sessions._live[trajectory].journal.sandbox is sandbox
    world.sessions.close()
    assert sandbox.ended
    assert not world.sessions.live()


def test_a_sandbox_that_begins_while_one_is_stopped_stays_known(world: World) -> None:
    world.started()
    world.ending = world.meanwhile
    world.sessions.stop(world.trajectory)
    _is_known(world, world.made[1])


def test_a_sandbox_that_begins_while_a_run_ends_stays_known(world: World) -> None:
    first = world.started()
    world.waiting = world.meanwhile
    world.sessions._finish(first, LOG, 0, TrajectoryStatus.FINISHED)
    assert world.status() is TrajectoryStatus.RUNNING
    _is_known(world, world.made[1])


def test_a_run_that_ends_late_leaves_the_status_alone(world: World) -> None:
    first = world.started()
    world.end(first)
    second = world.started()
    world.sessions._finish(first, LOG, 0, TrajectoryStatus.FINISHED)
    assert world.status() is TrajectoryStatus.RUNNING
    _is_known(world, second)


def test_a_run_that_ends_while_a_sandbox_is_started_leaves_the_status_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is called running, and is not known yet."""
    first = world.started()
    world.end(first)
    draw = world.catalog.trajectories.draw_fence
    ends = threading.Thread(target=world.sessions._finish, args=(first, LOG, 0, TrajectoryStatus.FINISHED))

    def drawn(trajectory: TrajectoryID) -> int:
        assert world.status() is TrajectoryStatus.RUNNING
        ends.start()
        ends.join(0.3)  # it must wait; else it does its harm in this time
        return draw(trajectory)

    monkeypatch.setattr(world.catalog.trajectories, "draw_fence", drawn)
    second = world.started()
    ends.join(60)
    assert world.status() is TrajectoryStatus.RUNNING
    _is_known(world, second)


def test_a_stop_waits_for_its_own_run(world: World) -> None:
    world.started()
    joined: list[str] = []

    def run(name: str) -> Any:
        return SimpleNamespace(join=lambda: joined.append(name))

    def meanwhile() -> None:
        world.meanwhile()
        world.sessions._live[world.trajectory.id].program = run("second")

    world.sessions._live[world.trajectory.id].program = run("first")
    world.ending = meanwhile
    world.sessions.stop(world.trajectory)
    assert joined == ["first"]
    assert world.sessions._live[world.trajectory.id].program is not None


def test_a_run_that_ends_on_a_full_disk_leaves_no_container(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.started()
    monkeypatch.setattr(world.catalog.trajectories, "set_status", _full)
    world.sessions._finish(first, LOG, 0, TrajectoryStatus.FINISHED)
    assert first.ended
    assert world.sessions.find(world.trajectory.id) is None


def test_closing_goes_on_whatever_one_sandbox_raises(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory, first = begin(make_image())
    world.sessions._register(world.launch(trajectory, first)[0], cast(Any, None))
    last = world.started()
    stop = world.sessions.stop

    def fails(of: Trajectory) -> None:
        if of.id == trajectory.id:
            raise AssertionError("a defect")
        stop(of)

    def defect() -> None:
        world.ending = lambda: None
        raise AssertionError("another")

    monkeypatch.setattr(world.sessions, "stop", fails)
    world.ending = defect
    world.sessions.close()
    assert last.ended


def test_a_sandbox_that_cannot_be_adopted_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.catalog.trajectories, "draw_fence", _full)
    with pytest.raises(OutOfSpace):
        world.started()
    assert world.made[0].ended
    assert world.sessions.find(world.trajectory.id) is None


def test_a_new_sandbox_that_cannot_be_adopted_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.catalog.trajectories, "draw_fence", _full)
    forgotten: list[str] = []
    begun = (world.trajectory, world.first, *world.launch(world.trajectory, world.first))
    disposal = SimpleNamespace(forget=forgotten.append)
    creation = SimpleNamespace(begin=lambda *_, **__: begun)
    runs: Any = SimpleNamespace(_creation=creation, _sessions=world.sessions, _disposal=disposal)
    with pytest.raises(OutOfSpace):
        RunService.create(runs, CreateRequest())
    assert world.made[0].ended
    assert forgotten == [world.trajectory.id]


def test_what_keeps_one_start_at_a_time_goes_with_it(world: World) -> None:
    """A daemon may start millions of trajectories."""
    name = world.trajectory.id
    with world.sessions.start_lock(name) as taken:
        assert taken
        assert world.sessions.start_lock(name).locked()
        assert not world.sessions.start_lock(TrajectoryID("another")).locked()
        assert list(world.sessions._starting) == [name]
    world.started()
    assert list(world.sessions._starting) == []


def test_who_resumes_while_another_does_stops_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment a sandbox is known and the one in which its program runs, it looks like one that nobody
    uses."""
    catalog, name = world.catalog, world.trajectory.id
    catalog.trajectories.set_began(name, world.first.id)
    resumes = Resumes(cast(Any, SimpleNamespace(catalog=catalog, ownership=ALONE)), world.sessions)
    refused: list[Conflict] = []
    starting, asked = world.sessions.start_lock, threading.Event()

    def asks(trajectory: TrajectoryID) -> threading.Lock:
        asked.set()
        return starting(trajectory)

    def resume() -> None:
        with pytest.raises(Conflict) as caught:
            resumes.resume(catalog.trajectories.get(name), [])
        refused.append(caught.value)

    monkeypatch.setattr(world.sessions, "start_lock", asks)
    with starting(name):
        sandbox, _ = world.launch(world.trajectory, world.first)
        sandbox.use.agent_running = False
        world.sessions._register(sandbox, cast(Any, None))
        second = threading.Thread(target=resume)
        second.start()
        assert asked.wait(60)
        assert not sandbox.ended
        sandbox.use.agent_running = True
    second.join(60)
    assert len(refused) == 1
    assert not sandbox.ended


@pytest.mark.parametrize(
    ("program", "args", "argv"),
    [
        (0, ("-p", "another task"), ("claude", "-p", "another task")),
        (0, ("bash", "-c", "true"), ("bash", "-c", "true")),
        (0, (), ()),
        (1, ("-x", "{index}"), ("claude", "-x", "3")),
        (1, ("x",), ("claude", "x")),
    ],
)
def test_the_arguments_of_a_fork(program: int, args: tuple[str, ...], argv: tuple[str, ...]) -> None:
    """A command cannot begin with a dash: such arguments are for the recorded one."""
    agent = AgentSpec(("claude", "-p", "the task"), program)
    assert fork_agent(cast(Any, SimpleNamespace(agent=agent)), args, 3).argv == argv


@pytest.mark.parametrize("shell", ["sh", "/bin/bash"])
def test_the_arguments_of_a_fork_are_those_of_a_script(shell: str) -> None:
    """Of the shell they are options that it does not know."""

    def forked(*argv: str) -> tuple[str, ...]:
        agent = AgentSpec(argv, 0)
        return fork_agent(cast(Any, SimpleNamespace(agent=agent)), ("--continue",), 0).argv

    assert forked(shell, "-c", "exec agent $*", "agent", "-p", "x") == (
        shell,
        "-c",
        "exec agent $*",
        "agent",
        "--continue",
    )
    assert forked(shell, "-c", "exec agent") == (shell, "--continue")
    assert forked(shell, "script", "a", "b") == (shell, "--continue")
