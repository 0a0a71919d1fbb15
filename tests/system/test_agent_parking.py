"""Parking for real: agents in their own pid and mount namespaces, whose root is pivoted while they wait at the end of a tool call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import snapshotd
from snapshotd.engine.agent_handler import BodyWriter, Intent, Outcome
from snapshotd.engine.agent_protocol import AgentServer
from snapshotd.kernel import mounts, namespaces
from snapshotd.layers.pivot import Target, layout_of, pivot
from snapshotd.layers.store import LayerStore
from snapshotd.types import ImageID, LayerID, Message, Stack, new_id

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount and pid namespaces")

PYTHON = os.environ.get("SNAPSHOTD_TEST_AGENT_PYTHON", sys.executable)
INIT = """
import json, os, subprocess, sys
os.chdir("/")
print("ready", flush=True)
for line in sys.stdin:
    done = subprocess.run(**json.loads(line), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""
"""The box's pid 1. `python -c`, so that it holds nothing open on the root."""


class Box:
    """A container without a container runtime: the host's root as the image below an overlay, pivoted by the product's own code."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.parked: list[bool] = []
        self.pivots = 0
        self.before_answer: Callable[[], None] = lambda: None
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)  # an upper layer may not lie in its lower one
        self._store = LayerStore(folder, "plain")
        image = ImageID(new_id())
        root = folder / "images" / image / "root"
        root.mkdir(parents=True)
        subprocess.run(["mount", "--bind", "/", str(root)], check=True)
        self._root = root
        self._init = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--mount-proc", PYTHON, "-c", INIT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
        )  # fmt: skip
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "ready\n"
        pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text())
        self._target = Target.of(pid, None)
        self._stack = Stack(image)
        self._upper = self._layer()
        pivot(self._target, self._store, self._stack, self._upper, layout_of(self._target), seal=False)
        self.server = AgentServer(shared / "agent.sock", self, lambda pid: True)

    def _layer(self) -> LayerID:
        layer = self._store.create()
        self._store.dress(layer, self._stack)
        return layer

    def close(self) -> None:
        self.server.close()
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.close()
        self._init.wait(20)
        self._init.stdout.close()
        self._target.close()
        self._store.close()
        subprocess.run(["umount", str(self._root)], check=True)
        subprocess.run(["umount", str(self.folder)], check=True)

    def snapshot(self, pid: int) -> None:
        """What the engine does: seal the root and pivot, if the agent is parked."""
        is_parked = self.server.parked_pids() == {pid}
        self.parked.append(is_parked)
        if is_parked:
            self.snapshot_now()
        self.before_answer()

    def snapshot_now(self) -> None:
        self._stack = self._stack.push(self._upper)
        self._upper = self._layer()
        pivot(self._target, self._store, self._stack, self._upper, layout_of(self._target), seal=True)
        self.pivots += 1

    def inside(self, action: Callable[[], None]) -> None:
        namespaces.in_mount_namespace(self._target.mount_ns_fd, action)

    def run(self, source: str, *, check: bool = True) -> tuple[str, str]:
        """Run a program as an agent in /var/tmp/parking-test of the box. Returns its standard output and error."""
        argv = [PYTHON, "-c", textwrap.dedent(source)]
        env = {
            "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(snapshotd.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1",
            "SNAPSHOTD_AGENT_SOCKET": str(self.shared / "agent.sock"),
        }  # fmt: skip
        self.inside(lambda: os.makedirs("/var/tmp/parking-test", exist_ok=True))
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.write(json.dumps({"args": argv, "env": env, "cwd": "/var/tmp/parking-test"}) + "\n")
        self._init.stdin.flush()
        code, out, err = json.loads(self._init.stdout.readline())
        if check:
            assert code == 0, err
            assert err == ""
        return out, err

    # -- the handler -----------------------------------------------------------------------------------------------------------

    def hello(self, pid: int) -> dict[str, Any]:
        return {"trajectory": "t", "snapshot": "s", "replaying": False}

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool) -> dict[str, Any]:
        return {"key": intent.call_id}

    def body_writer(self, call_id: str) -> BodyWriter:
        raise AssertionError("no large results here")

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        self.snapshot(pid)
        return "s"

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool) -> dict[str, Any]:
        self.snapshot(pid)
        return {"snapshot": "s"}

    def message(self, role: str, content: Any, within: str | None, rid: str | None) -> None:
        pass

    def messages(self, offset: int, limit: int) -> list[Message]:
        return []


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    shared = Path("/dev/shm") / f"parking-{os.getpid()}"  # a mount of its own in every root: unix sockets do not work through an overlay
    shared.mkdir()
    folder = tmp_path / "layers"
    folder.mkdir()
    made = Box(folder, shared)
    yield made
    made.close()
    shutil.rmtree(shared)
    assert [mount.point for mount in mounts.read_mountinfo() if mount.point.startswith(bytes(tmp_path))] == []


def test_open_files_and_directory_survive_ten_pivots(box: Box) -> None:
    out, _ = box.run("""
        import logging, os, sys
        from snapshotd.agent import tool
        os.makedirs("work/deep", exist_ok=True)
        os.chdir("work")
        logging.basicConfig(filename="agent.log", level=logging.INFO, format="%(message)s")
        written = open("written", "w")
        written.write("head ")
        open("source", "w").write("".join("line %d\\n" % n for n in range(100)))
        source = open("source")
        assert source.readline() == "line 0\\n"
        update = open("update", "w+b", buffering=0)
        update.write(b"0123456789")
        update.seek(3)
        folder = os.open("deep", os.O_RDONLY | os.O_DIRECTORY)
        handle = os.open("source", os.O_PATH)
        first = os.open("shared", os.O_RDWR | os.O_CREAT)
        second = os.dup(first)
        lone = os.open("shared", os.O_RDWR)
        os.set_inheritable(second, True)
        reader, writer = os.pipe()
        os.write(writer, b"pipe")
        root = os.open("/", os.O_RDONLY)
        mount = lambda file: [l for l in open("/proc/self/fdinfo/%d" % file.fileno()) if l.startswith("mnt_id")]
        @tool
        def step(n):
            logging.info("inside %d", n)
            os.write(first if n % 2 else second, b"%d" % n)
            open("step%d" % n, "w").close()
        for n in range(10):
            step(n)
            assert os.getcwdb() == b"/var/tmp/parking-test/work", os.getcwdb()
            with open("fresh", "w") as fresh:
                assert mount(source) == mount(written) == mount(fresh)       # ids are used again: comparing with earlier ones says nothing
            logging.info("outside %d", n)
            written.write("%d" % n)
            written.flush()
            assert source.readline() == "line %d\\n" % (n + 1) and os.path.samestat(os.fstat(handle), os.stat("source"))
            os.mkdir("made%d" % n, dir_fd=folder)
            os.stat("var/tmp/parking-test/work/step%d" % n, dir_fd=root)
            assert os.get_inheritable(second) and not os.get_inheritable(first)
            assert os.lseek(first, 0, os.SEEK_CUR) == os.lseek(second, 0, os.SEEK_CUR) == n + 1
            assert os.lseek(lone, 0, os.SEEK_CUR) == 0
        update.write(b"X")
        assert open("agent.log").read() == "".join("inside %d\\noutside %d\\n" % (n, n) for n in range(10))
        assert open("written").read() == "head 0123456789"
        assert open("update").read() == "012X456789"
        assert open("shared").read() == "0123456789"
        assert sorted(os.listdir("deep")) == sorted("made%d" % n for n in range(10))
        assert os.read(reader, 10) == b"pipe"
        os.write(written.fileno(), b" end")
        assert open("written").read().endswith(" end")
        print("ok", len(os.listdir("/proc/self/fd")))
    """)
    assert out.startswith("ok ")
    assert box.pivots == 10


def test_a_checkpoint_parks_too(box: Box) -> None:
    box.run("""
        from snapshotd.agent import checkpoint
        log = open("log", "w")
        assert checkpoint("here") == "s"
        log.write("after")
        log.close()
        assert open("log").read() == "after"
    """)
    assert box.parked == [True]


DECLINED = {
    "a lock": "import fcntl; f = open('x', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
    "a record lock taken through another descriptor": "import fcntl; f = open('x', 'w'); g = open('x', 'w'); fcntl.lockf(f, fcntl.LOCK_EX)",
    "a deleted file": "import tempfile; f = tempfile.TemporaryFile(dir='.')",
    "a replaced file": "f = open('x', 'w'); open('y', 'w').close(); os.rename('y', 'x')",
    "a deleted working directory": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    "a fifo": "os.mkfifo('fifo'); f = os.open('fifo', os.O_RDWR)",
    "an inotify watch": "import ctypes; assert ctypes.CDLL(None).inotify_init() >= 0",
    "a standard stream": "os.dup2(os.open('out', os.O_WRONLY | os.O_CREAT), 0)",
    "a child process": "import subprocess; c = subprocess.Popen(['sleep', '100']); done = lambda: (c.kill(), c.wait())",
    "a busy thread": "import threading, time; t = threading.Thread(target=lambda: [time.sleep(0.0001) for _ in iter(lambda: stop, [1])]);"
                     "stop = []; t.start(); done = lambda: (stop.append(1), t.join())",
    "a thread that waits for input": "import threading; r, w = os.pipe(); t = threading.Thread(target=os.read, args=(r, 1)); t.start();"
                                     "done = lambda: (os.write(w, b'x'), t.join())",
    "a thread that waits with a timeout": "import threading; e = threading.Event(); t = threading.Thread(target=e.wait, args=(60,));"
                                          "t.start(); done = lambda: (e.set(), t.join())",
    "a file that may not be opened again": "f = open('x', 'w'); os.chmod('x', 0o400); os.chmod('.', 0o777); os.setresuid(1234, 1234, 1234)",
}  # fmt: skip


@pytest.mark.parametrize("setup", DECLINED.values(), ids=DECLINED)
def test_what_cannot_be_undone_is_not_parked(box: Box, setup: str) -> None:
    out, _ = box.run(f"""
        import os
        from snapshotd.agent import tool
        kept = open("kept", "w+")
        done = lambda: None
        {setup}
        target = os.stat(kept.fileno())
        place = os.stat(".")
        @tool
        def step(): pass
        step()
        assert os.path.samestat(os.stat(kept.fileno()), target) and os.path.samestat(os.stat("."), place)
        from snapshotd.agent import parking
        print(parking.park()[1])
        done()
    """)
    assert box.parked == [False]
    assert len(out.strip()) > 10


def test_a_recorded_lock_survives(box: Box) -> None:
    """Opening a file on trial and closing it would drop the process's record locks on it."""
    out, _ = box.run("""
        import fcntl, os
        from snapshotd.agent import tool
        f, g = open("x", "w"), open("x", "w")
        fcntl.lockf(f, fcntl.LOCK_EX)
        @tool
        def step(): pass
        step()
        child = os.fork()
        if not child:
            try:
                fcntl.lockf(g, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os._exit(0)
            os._exit(1)
        print(os.waitpid(child, 0)[1])
    """)
    assert out == "0\n"


IDLE = {
    "idle pool workers": "pool = ThreadPoolExecutor(4); all = [pool.submit(int) for _ in range(8)]; [f.result() for f in all];"
                         "step(); pool.shutdown()",
    "the main thread in join": "t = threading.Thread(target=lambda: (waits(), step())); t.start(); t.join()",
    "the main thread in result": "pool = ThreadPoolExecutor(1); pool.submit(lambda: (waits(), step())).result(); pool.shutdown()",
    "a zombie": "import subprocess; c = subprocess.Popen(['true']); os.waitid(os.P_PID, c.pid, os.WEXITED | os.WNOWAIT); step(); c.wait()",
}  # fmt: skip


@pytest.mark.parametrize("use", IDLE.values(), ids=IDLE)
def test_idle_threads_and_zombies_do_not_hinder(box: Box, use: str) -> None:
    box.run(f"""
        import os, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from snapshotd.agent import tool
        log = open("log", "w")
        @tool
        def step(): log.write("inside ")
        def waits():
            "Return when the main thread has got to where it waits, and had time to fall asleep there."
            seen = 0
            while seen < 20:
                here = sys._current_frames()[threading.main_thread().ident].f_code.co_name
                seen = seen + 1 if here in ("wait", "join", "_wait_for_tstate_lock") else 0
                time.sleep(0.005)  # lets it run
        {use}
        log.write("outside")
        log.close()
        assert open("log").read() == "inside outside"
    """)
    assert box.parked == [True]


def test_parallel_threads_lose_nothing(box: Box) -> None:
    """Threads write to one log all the time, some of them outside of any call: whatever gets parked, no line is lost."""
    box.run("""
        import os, threading, time
        from snapshotd.agent import tool
        log = os.open("log", os.O_WRONLY | os.O_CREAT)       # no O_APPEND: offsets matter
        @tool
        def step(n): os.write(log, b"x" * 10)
        def work(n):
            for _ in range(30):
                step(n)
                os.write(log, b"y" * 10)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        data = open("log", "rb").read()
        assert len(data) == 4 * 30 * 20 and data.count(b"x") == data.count(b"y"), (len(data), data[:200])
    """)
    assert len(box.parked) == 120


def test_asyncio_tools_in_parallel_lose_nothing(box: Box) -> None:
    box.run("""
        import asyncio
        from snapshotd.agent import tool
        log = open("log", "w")
        @tool
        async def step(n):
            for _ in range(5):
                log.write("x")
                await asyncio.sleep(0)
        async def main():
            await asyncio.gather(*(step(n) for n in range(20)))
        asyncio.run(main())
        log.close()
        assert open("log").read() == "x" * 100
    """)
    assert box.parked == [True] * 20


def test_a_file_that_is_gone_afterwards_is_named(box: Box) -> None:
    def remove() -> None:
        os.unlink("/var/tmp/parking-test/victim")
        os.rmdir("/var/tmp/parking-test/place")

    box.before_answer = lambda: box.inside(remove)
    out, err = box.run("""
        import os
        from snapshotd.agent import tool
        other, victim, last = open("other", "w"), open("victim", "w"), open("last", "w")
        os.mkdir("place"); os.chdir("place")
        @tool
        def step(): pass
        step()
        victim.write("into the void"); victim.close()
        last.write("kept"); last.close()
        print(os.getcwd(), open("/var/tmp/parking-test/last").read())
    """, check=False)
    assert out == "/ kept\n"
    first, second = err.splitlines()
    assert "(/var/tmp/parking-test/victim) could not be opened again after the snapshot" in first
    assert "the working directory /var/tmp/parking-test/place could not be entered again" in second


def test_a_signal_while_parked_runs_its_handler_afterwards(box: Box) -> None:
    agent: list[int] = []

    def signal_agent() -> None:
        os.kill(agent[0], 15)

    original = box.snapshot

    def snapshot(pid: int) -> None:
        agent.append(pid)
        original(pid)

    box.snapshot = snapshot  # type: ignore[method-assign]
    box.before_answer = signal_agent
    box.run("""
        import os, signal
        from snapshotd.agent import tool
        log = os.open("log", os.O_WRONLY | os.O_CREAT)
        signal.signal(signal.SIGTERM, lambda *_: os.write(log, b"handled "))
        @tool
        def step(): os.write(log, b"step ")
        step()
        os.write(log, b"end")
        assert open("log").read() == "step handled end"
    """)
    assert box.parked == [True]


def test_parking_costs_little(box: Box) -> None:
    """Three open files. The bound is ten times what was measured, for busy machines."""
    out, _ = box.run("""
        import time
        from snapshotd.agent import parking
        files = [open("f%d" % n, "w") for n in range(3)]
        took = []
        for _ in range(300):
            start = time.perf_counter()
            place, why = parking.park()
            assert place is not None and len(place.files) == 3, why
            assert parking.unpark(place) == []
            took.append(time.perf_counter() - start)
        print(sorted(took)[150])
    """)
    assert float(out) < 0.003, out


