"""The processes that bring cold snapshots back are killed in the middle: whoever waits gets the right bytes or an
error, soon, and the next who asks gets the files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from snapshotd.api.commands import CommandFields
from snapshotd.api.history import RewindRequest
from snapshotd.api.trajectories import ForkRequest, RemoveQuery
from snapshotd.engine.engine import Engine
from snapshotd.engine.storage import evict
from snapshotd.errors import InternalError
from snapshotd.types import Snapshot
from tests import mind_rig
from tests.capabilities import require
from tests.storage_rig import wait_until

pytestmark = pytest.mark.runc
SOON_S = 60.0
"""Who reads on a dead mount and is not told would wait for the layer, which is held back, for ever."""
FILES, FILE_BYTES = 24, 1 << 20


@contextlib.contextmanager
def _opened(small_root: Path) -> Iterator[Engine]:
    """One that keeps no layer it need not keep."""
    require("root", "fuse")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evict, "budget_bytes", lambda _: 0)
        with mind_rig.engine(small_root) as opened:
            yield opened


@pytest.fixture(scope="module")
def engine(small_root: Path) -> Iterator[Engine]:
    with _opened(small_root) as opened:
        yield opened


@pytest.fixture(scope="module")
def stored(engine: Engine) -> Snapshot:
    return _stored(engine)


def _stored(engine: Engine) -> Snapshot:
    """A stored snapshot with `FILES` files of a megabyte."""
    agent = mind_rig.agent(engine)
    call, _ = agent.begin("fill", {})
    data = Path(f"/proc/{agent.sandbox.container.pid}/root/workspace/data")
    data.mkdir()
    for number in range(FILES):
        (data / str(number)).write_bytes(_content(number))
    snapshot = agent.end(call)
    engine.storage.flush()
    engine.runs.stop(agent.id)
    return snapshot


def _evict(engine: Engine, snapshot: Snapshot) -> None:
    wait_until(
        lambda: engine.life._disposal.evict() == 0 and not engine.life._cold.is_hot(snapshot), "its layers are evicted"
    )


@pytest.fixture
def cold(engine: Engine, stored: Snapshot) -> Iterator[Snapshot]:
    """The snapshot without its layers, and no other trajectory."""
    _evict(engine, stored)
    with engine.life._cold._lock:
        engine.life._cold._forget_evicted()
    yield stored
    engine.storage.flush()
    for trajectory in engine.snapshots.trajectories():
        if trajectory.id != stored.trajectory:
            engine.runs.remove(trajectory.id, RemoveQuery(force=True))


def _content(number: int) -> bytes:
    """Does not compress, and differs from file to file."""
    return hashlib.shake_128(b"%d" % number).digest(FILE_BYTES)


def _read(engine: Engine, trajectory: str, number: int) -> bytes | None:
    """A file of a sandbox; None when its program says that it cannot be read."""
    said: list[bytes] = []
    sandbox = engine.life._sessions.ensure_running(engine.snapshots.trajectory(trajectory))
    result = engine.life._sessions.commands.exec(
        sandbox,
        CommandFields(("cat", f"data/{number}"), cwd="/workspace"),
        record=False,
        sink=lambda stream, data: said.append(data) if stream == "stdout" else None,
    )
    return b"".join(said) if result.exit_code == 0 else None


def _fork(engine: Engine, snapshot: Snapshot) -> str:
    return engine.branching.fork(snapshot.id, ForkRequest()).trajectories[0].id


def _lazy_pid(engine: Engine) -> int:
    lazy = engine.life._cold._lazy
    assert lazy is not None
    return lazy.start().pid  # type: ignore[attr-defined]


def _in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@contextlib.contextmanager
def _held_back(engine: Engine) -> Iterator[None]:
    """The layer that is being written does not become complete in the block, and is there after it."""
    rebuilder = engine.life._cold._rebuilder
    wait_until(lambda: rebuilder.pid is not None, "the layer is being written")
    assert rebuilder.pid is not None
    os.kill(rebuilder.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(rebuilder.pid, signal.SIGCONT)
    wait_until(lambda: all(item.written.done() for item in engine.life._cold._rebuilt.values()), "the layer is written")


def _kill_lazy(engine: Engine) -> None:
    os.kill(_lazy_pid(engine), signal.SIGKILL)
    wait_until(lambda: engine.life._cold._lazy.server() is None, "it is dead")  # type: ignore[union-attr]


def test_a_cold_fork_whose_fuse_process_is_killed_while_it_is_read(engine: Engine, cold: Snapshot) -> None:
    lazy = _lazy_pid(engine)
    first = _fork(engine, cold)
    with _held_back(engine):
        assert _read(engine, first, 0) == _content(0)
        os.kill(lazy, signal.SIGSTOP)  # so that the reader is certainly in the middle
        seen: list[bytes | None] = []
        reader = _in_thread(lambda: seen.append(_read(engine, first, 1)))
        wait_until(lambda: _waits_for_fuse(engine, first), "the reader waits for the process")
        os.kill(lazy, signal.SIGKILL)
        reader.join(SOON_S)
        assert seen in ([None], [_content(1)]), "an error or the file, and at once"
        for number in range(2, 6):
            began = time.monotonic()
            assert _read(engine, first, number) in (None, _content(number))
            assert time.monotonic() - began < SOON_S
        second = _fork(engine, cold)  # which starts the process again
        assert _read(engine, second, 1) == _content(1)
    engine.branching.rewind(first, RewindRequest(cold.id, mode="files"))
    assert [_read(engine, first, number) for number in range(6)] == [_content(number) for number in range(6)]


def test_the_next_command_finds_the_files_again(engine: Engine, cold: Snapshot) -> None:
    """In the sandbox that stood on the dead process's mount: while its layer is still being written, when it is, and
    with files of its own that no snapshot has."""
    agent = mind_rig.Agent(engine, _fork(engine, cold))
    sandbox = agent.sandbox
    with _held_back(engine):
        assert _read(engine, agent.id, 0) == _content(0)
        _kill_lazy(engine)
        assert _read(engine, agent.id, 1) == _content(1)
        assert not sandbox.root.changed
        assert len(sandbox.root.own_layers) == 1, "an upper that held nothing is not kept"
        agent.sh("echo note > note")
        _kill_lazy(engine)
        assert _read(engine, agent.id, 2) == _content(2)
        assert agent.sh("cat note") == "note\n"
    assert sandbox.root.lazy, "it still stands on what is served"
    _kill_lazy(engine)
    kept = agent.tool("look", {}, "cat data/3 > /dev/null; cat note")
    assert not sandbox.root.lazy
    assert agent.sandbox is sandbox
    assert b"".join(engine.snapshots.cat(kept.id, b"workspace/note")) == b"note\n"
    assert b"".join(engine.snapshots.cat(kept.id, b"workspace/data/3")) == _content(3)


def test_a_step_without_a_command_leaves_the_dead_mount(engine: Engine, cold: Snapshot) -> None:
    """An agent's calls run no command of ours: its files are there again behind the call."""
    agent = mind_rig.Agent(engine, _fork(engine, cold))
    with _held_back(engine):
        data = Path(f"/proc/{agent.sandbox.container.pid}/root/workspace/data")
        call, _ = agent.begin("think", {})
        _kill_lazy(engine)
        assert agent.end(call).method == "unchanged"
        assert (data / "4").read_bytes() == _content(4)


def test_a_fuse_process_that_is_killed_while_it_starts_is_started_again(
    engine: Engine, cold: Snapshot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fork(engine, cold)
    with _held_back(engine):
        _kill_lazy(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine.life._cold._lazy, "_command", ["sh", "-c", "kill -9 $$"])
            engine.life._cold.prepare()
        assert "signal 9 killed the process" in caplog.text
        assert _read(engine, _fork(engine, cold), 1) == _content(1)


def test_what_came_back_and_went_again_is_forgotten(engine: Engine, cold: Snapshot) -> None:
    pid = _lazy_pid(engine)
    for _ in range(2):
        fork = _fork(engine, cold)
        assert _read(engine, fork, 3) == _content(3)
        wait_until(
            lambda: all(item.written.done() for item in engine.life._cold._rebuilt.values()), "the layer is written"
        )
        engine.runs.remove(fork, RemoveQuery(force=True))
        wait_until(
            lambda: engine.life._disposal.evict() == 0 and engine.life._context.store.sizes.total() == 0,
            "the layer is evicted again",
        )
    with engine.life._cold._lock:
        engine.life._cold._forget_evicted()
    assert not engine.life._cold._rebuilt
    assert _lazy_pid(engine) == pid, "the process goes on"


def _waits_for_fuse(engine: Engine, trajectory: str) -> bool:
    for pid in engine.life._sessions.ensure_running(engine.snapshots.trajectory(trajectory)).cgroup.processes():
        try:
            if any(word in Path(f"/proc/{pid}/wchan").read_text() for word in ("fuse", "request_wait")):
                return True
        except OSError:
            continue  # it has ended meanwhile
    return False


def _restored_some(target: Path) -> bool:
    """Whether files are there already. Directories are renamed meanwhile, which `Path.rglob` does not bear."""
    return any(names and Path(base).name == "data" for base, _, names in os.walk(target))


def test_a_restore_during_which_the_fuse_process_is_killed(engine: Engine, cold: Snapshot, tmp_path: Path) -> None:
    lazy = _lazy_pid(engine)
    fork = _fork(engine, cold)
    restored = _in_thread(lambda: engine.snapshots.restore(cold.id, tmp_path / "to", path=b"/workspace"))
    wait_until(lambda: _restored_some(tmp_path), "the restore is in the middle")
    os.kill(lazy, signal.SIGKILL)
    restored.join()
    assert {path.name: path.read_bytes() for path in (tmp_path / "to/data").iterdir()} == {
        str(n): _content(n) for n in range(FILES)
    }
    engine.runs.remove(fork, RemoveQuery(force=True))


def test_a_restore_whose_own_process_is_killed(engine: Engine, cold: Snapshot, tmp_path: Path) -> None:
    failures: list[InternalError] = []

    def restore() -> None:
        try:
            engine.snapshots.restore(cold.id, tmp_path / "to", path=b"/workspace")
        except InternalError as exc:
            failures.append(exc)

    rebuilder = engine.life._cold._rebuilder
    restored = _in_thread(restore)
    wait_until(lambda: _restored_some(tmp_path), "the restore is in the middle")
    assert rebuilder.pid is not None
    os.kill(rebuilder.pid, signal.SIGKILL)
    restored.join(SOON_S)
    assert not restored.is_alive()
    assert failures or (tmp_path / "to").exists(), "killed in the middle, or just finished"
    if failures:
        assert not list(tmp_path.iterdir()), "nothing half is left"
        restore()
    assert {path.name: path.read_bytes() for path in (tmp_path / "to/data").iterdir()} == {
        str(n): _content(n) for n in range(FILES)
    }


def test_where_fuse_fails_for_good_a_start_waits_for_the_layer_that_was_served(
    small_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is this test's own, since it does not try FUSE again."""
    with _opened(small_root) as engine:
        cold = _stored(engine)
        _evict(engine, cold)
        _fail_for_good(engine, cold, monkeypatch, caplog)


def _fail_for_good(
    engine: Engine, cold: Snapshot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fork(engine, cold)
    seen: list[bytes | None] = []
    with _held_back(engine):
        _kill_lazy(engine)
        monkeypatch.setattr(engine.life._cold._lazy, "_command", ["false"])
        engine.life._cold.prepare()
        assert "start only when their files are written" in caplog.text
        (rebuilt,) = engine.life._cold._rebuilt.values()
        waits = threading.Event()
        monkeypatch.setattr(rebuilt.written, "result", lambda: (waits.set(), Future.result(rebuilt.written)))
        starting = _in_thread(lambda: seen.append(_read(engine, _fork(engine, cold), 1)))
        assert waits.wait(60)
    starting.join(SOON_S)
    assert seen == [_content(1)]
