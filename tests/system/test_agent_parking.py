"""Parking for real: agents in their own pid and mount namespaces, whose root is pivoted while they wait at the end of a
tool call."""

from __future__ import annotations

import os

import pytest

from tests.parking_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount and pid namespaces")


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
}


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
        from snapshotd.agent.wire import parking
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
    "idle pool workers": "pool = ThreadPoolExecutor(4); eight = [pool.submit(int) for _ in range(8)]; [f.result() for f in eight];"
    "rest(); step(); pool.shutdown()",
    "the main thread in join": "t = threading.Thread(target=lambda: (rest(in_main), step())); t.start(); t.join()",
    "the main thread in result": "pool = ThreadPoolExecutor(1); pool.submit(lambda: (rest(in_main), step())).result(); pool.shutdown()",
    "a zombie": "import subprocess; c = subprocess.Popen(['true']); os.waitid(os.P_PID, c.pid, os.WEXITED | os.WNOWAIT); step(); c.wait()",
}


@pytest.mark.parametrize("use", IDLE.values(), ids=IDLE)
def test_idle_threads_and_zombies_do_not_hinder(box: Box, use: str) -> None:
    box.run(f"""
        import os, sys, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from snapshotd.agent import tool
        log = open("log", "w")
        @tool
        def step(): log.write("inside ")
        def in_main():
            "True if the main thread has got to where it waits."
            here = sys._current_frames()[threading.main_thread().ident].f_code.co_name
            return here in ("wait", "join", "_wait_for_tstate_lock")
        def asleep(thread):
            with open("/proc/self/task/" + thread + "/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "S"
        def rest(also=lambda: True):
            "Return when all other threads are asleep each time that they could run."
            seen, me = 0, str(threading.get_native_id())
            while seen < 20:
                seen = seen + 1 if all(asleep(one) for one in os.listdir("/proc/self/task") if one != me) and also() else 0
                time.sleep(0.005)  # lets them run
        {use}
        log.write("outside")
        log.close()
        assert open("log").read() == "inside outside"
    """)
    assert box.parked == [True]


def test_parallel_threads_lose_nothing(box: Box) -> None:
    """Threads write to one log all the time, some of them outside of any call: whatever gets parked, no line is
    lost."""
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
    out, err = box.run(
        """
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
    """,
        check=False,
    )
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
    """Three open files; the time of the processor, since a busy machine adds its own. The bound is ten times what was
    measured."""
    out, _ = box.run("""
        import time
        from snapshotd.agent.wire import parking
        files = [open("f%d" % n, "w") for n in range(3)]
        took = []
        for _ in range(300):
            start = time.process_time()
            place, why = parking.park()
            assert place is not None and len(place.files) == 3, why
            assert parking.unpark(place) == []
            took.append(time.process_time() - start)
        print(sorted(took)[150])
    """)
    assert float(out) < 0.003, out
