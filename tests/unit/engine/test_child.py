"""The child processes' end of their protocol."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from snapshotd.engine.storage.child import EngineChild
from snapshotd.errors import Unavailable

CHILD = """
from snapshotd.engine.storage import child
from snapshotd.errors import NotFound

def handle(request, progress):
    {work}
    return {{}}

child.serve(handle)
"""


@pytest.mark.parametrize(
    "work", ["pass", "progress('a part')", "raise NotFound('it is gone')", "raise OSError(5, 'a broken disk')"]
)
def test_a_child_whose_daemon_has_gone_ends_without_a_word(work: str) -> None:
    argv = [sys.executable, "-c", CHILD.format(work=work)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        child.stdin.write(b"{}\n")
        child.stdin.flush()
        assert child.wait(60) == 0
        assert child.stderr.read() == b""


ECHO = """
from snapshotd.engine.storage import child

def handle(request, progress):
    progress("a part")
    return {"op": request["op"]}

child.serve(handle)
"""


def test_an_answer_that_nobody_waited_for_is_not_the_next_ones() -> None:
    child = EngineChild([sys.executable, "-c", ECHO])

    def stop(_: str) -> None:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            child.ask({"op": "first"}, stop)
        assert child.ask({"op": "second"}) == {"op": "second"}
    finally:
        child.close()


AWAY = """
from snapshotd.engine.storage import child
from snapshotd.errors import ServiceAwayError

tries = iter(["opening", "", "asking", ""])

def look():
    if at := next(tries):
        raise ServiceAwayError(f"the bucket does not answer: {at}")

def handle(request, progress):
    look()
    return {}

def open_handler():
    look()
    return handle

child.serve(child.open_lazily(open_handler))
"""


def test_a_bucket_that_does_not_answer_is_unavailable_until_it_does() -> None:
    child = EngineChild([sys.executable, "-c", AWAY])
    try:
        for at in ("opening", "asking"):
            with pytest.raises(Unavailable, match=f"the bucket does not answer: {at}"):
                child.ask({"op": "prune"})
        pid = child.pid
        assert (child.ask({"op": "prune"}), child.pid) == ({}, pid)
    finally:
        child.close()


GREEDY = """
from snapshotd.engine.storage import child
from snapshotd.kernel import memory

assert memory.keep_freed(), "no such settings"
child.REST_AFTER_S = 0.01

def handle(request, progress):
    taken = [bytearray(100_000) for _ in range(800)]
    return {"kib": anonymous()}

def anonymous():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

child.serve(handle)
"""


def test_who_rests_gives_memory_back() -> None:
    child = EngineChild([sys.executable, "-c", GREEDY])
    try:
        busy = child.ask({"op": "work"})["kib"]
        assert busy > 80_000
        end = time.monotonic() + 60
        while (now := anonymous_kib(child.pid)) > busy - 60_000:
            assert time.monotonic() < end, f"{now} KiB of {busy} are still taken"
        assert child.ask({"op": "work"})["kib"] > 80_000
    finally:
        child.close()


def anonymous_kib(pid: int | None) -> int:
    with open(f"/proc/{pid}/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
