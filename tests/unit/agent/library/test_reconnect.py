"""Agents whose daemon is killed and started again under them: nothing is lost, nothing is done twice, and the program
notices nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library_rig import Shell, meanwhile, run
from programs import OUTCOMES

from tests.agent_daemon import FakeDaemon
from tests.unit.agent.library.programs import THREADS

Run = Callable[..., "subprocess.CompletedProcess[str]"]
DEATHS = ("arriving", "before", "after", "answering")

EVERYTHING = """
    from snapshotd.agent import (approve, checkpoint, emit, message, messages, model, now, random, state, store, task, tasks, tool, uuid)
    large = "x" * 100000                                    # travels as a body
    @tool
    def work(n, text):
        emit("working"); emit(b"\\xff", "stderr")
        message("tool", [n, text])
        return text
    assert [work(n, large) for n in range(2)] == [large] * 2
    facts = [now(), random(), uuid()]
    assert model("gpt", {"n": 1}, call=lambda: large) == large
    state["k"] = large
    state["gone"] = 1
    del state["gone"]
    with task("plan"):
        assert store.put("k", large) == 1 and store.put("k", "new") == 2
        message("user", "hello")
    assert [entry["status"] for entry in tasks()] == ["completed"]
    assert store.get("k", version=1) == large and [entry.value for entry in store.search()] == ["new"]
    store.delete("k")
    assert store.put("k", 4) == 4
    assert checkpoint("here") != checkpoint("there")
    assert [entry["content"] for entry in messages()] == [[0, large], [1, large], "hello"]
    assert len(state) == 1 and len(set(facts)) == 3
    assert approve("Sure?") and approve("Really?")          # on connections of their own
"""
REQUESTS = {
    "call_begin",
    "call_end",
    "output",
    "fact",
    "message",
    "messages",
    "state",
    "state_set",
    "task",
    "tasks",
    "checkpoint",
    "approve",
    "store_get",
    "store_put",
    "store_delete",
    "store_search",
}


def sendings(daemon: FakeDaemon, op: str) -> list[list[dict[str, Any]]]:
    """The requests of a kind, each with all its sendings, without the number of the line."""
    found: list[list[dict[str, Any]]] = []
    for request in daemon.sent(op):
        sent = {name: value for name, value in request.items() if name != "id"}
        if sent.pop("again", False):
            found[-1].append(sent)
        else:
            found.append([sent])
    return found


def decide_all(daemon: FakeDaemon, running: Any) -> None:
    """Agree to every question until the program has ended."""
    deadline = time.monotonic() + 120
    while not running.done():
        assert time.monotonic() < deadline
        with daemon.lock:
            if daemon.waiting:
                daemon.decide(daemon.waiting[0], True)
        time.sleep(0.005)
    running.result(0)


@pytest.mark.parametrize("death", DEATHS)
def test_every_request_is_sent_again_and_done_once(death: str, python: Path, library: Path, socket_path: Path) -> None:
    program = socket_path.parent / "agent.py"
    program.write_text(textwrap.dedent(EVERYTHING))
    daemon = FakeDaemon()
    daemon.deaths = dict.fromkeys(REQUESTS, death)
    with daemon.serving(socket_path):
        decide_all(daemon, meanwhile(lambda: run(python, library, socket_path, str(program))))
    assert daemon.deaths == {}
    for op in REQUESTS:
        first, *others = sendings(daemon, op)
        assert len(first) == 2, op
        assert first[0] == first[1], op
        assert all(len(other) == 1 for other in others), op
    assert [(call["name"], call["status"]) for call in daemon.calls.values()] == [
        ("work", "done"),
        ("work", "done"),
        ("gpt", "done"),
        ("plan", "done"),
    ]
    assert list(daemon.outputs.values()) == [{"stdout": b"working", "stderr": b"\xff"}] * 2
    assert len(daemon.facts) == 3
    assert daemon.lost == []
    hellos = daemon.sent("hello")
    assert [hello.get("again", False) for hello in hellos] == [False] + [True] * (len(REQUESTS) - 1) + [
        False,
        True,
        False,
    ]
    first_call = next(iter(daemon.calls))
    # killed in the first call_begin, which is not known to have begun; then in its output, message and end
    assert [hello["calls"] for hello in hellos[1:5]] == [[], [first_call], [first_call], [first_call]]
    assert hellos[-2]["calls"] == []


@pytest.mark.parametrize("death", ["before", "answering"])
def test_a_replay_goes_on(death: str, run_agent: Run, socket_path: Path) -> None:
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(OUTCOMES)
    second = first.resumed()
    second.deaths = {"call_begin": death}
    second.at_death = lambda pid: second.deaths.update(call_begin=death) if len(second.pids) < 4 else None
    with second.serving(socket_path):
        after = run_agent(OUTCOMES)
    assert len(second.pids) == 5
    assert second.old_journal == []
    assert not second.calls
    assert {hello.get("calls", []) == [] for hello in second.sent("hello")} == {True}
    assert after.stdout.splitlines() == [before.stdout.splitlines()[0], "[]"]  # the same outcomes, and nothing ran


def test_a_daemon_that_dies_in_its_greeting_and_comes_back_late(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run
) -> None:
    deaths = iter(["arriving", "before", "answering"])

    def at_death(pid: int) -> None:
        time.sleep(0.2)  # long enough for some attempts that find nobody
        daemon.deaths.update({"hello": death} if (death := next(deaths, None)) else {})

    daemon.deaths, daemon.at_death = {"message": "after"}, at_death
    run_agent("from snapshotd.agent import message\nmessage('user', 1)\nmessage('user', 2)")
    assert [entry["content"] for entry in daemon.conversation] == [1, 2]
    assert [len(sent) for sent in sendings(daemon, "message")] == [2, 1]
    assert [hello.get("again") for hello in daemon.sent("hello")] == [None, True, True, True, True]


def test_an_idle_program_reconnects_at_its_next_request(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run, tmp_path: Path
) -> None:
    running = meanwhile(
        lambda: run_agent("""
        import os, time
        from snapshotd.agent import message, tool
        @tool
        def work():
            open("began", "w").close()
            while not os.path.exists("restarted"): time.sleep(0.005)
        work()
    """)
    )
    poll(lambda: (tmp_path / "began").exists())
    daemon.die()
    (tmp_path / "restarted").touch()
    running.result(60)
    (call,) = daemon.calls
    assert daemon.calls[call]["status"] == "done"
    assert daemon.sent("hello")[1]["calls"] == [call]


def test_a_refusal_is_final(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    daemon.deaths = {"store_delete": "before"}
    done = run_agent("""
        from snapshotd.agent import SnapshotdError, store
        for _ in range(2):
            try: store.delete("k")
            except SnapshotdError as error: print(error.code)
    """)
    assert done.stdout == "NotFound\nNotFound\n"
    assert [len(sent) for sent in sendings(daemon, "store_delete")] == [2, 1]


def test_patience_ends(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run, tmp_path: Path) -> None:
    """Then each request tries once, until a daemon is there: that one gets the calls that are still open."""
    gone, back = tmp_path / "gone", tmp_path / "back"

    def at_death(pid: int) -> None:
        poll(gone.exists)

    daemon.deaths, daemon.at_death = {"message": "before"}, at_death
    running = meanwhile(
        lambda: run_agent(
            """
        import os, time
        from snapshotd.agent import SnapshotdUnavailable, message, tool
        @tool
        def work():
            for _ in range(2):
                try: message("user", 1)
                except SnapshotdUnavailable as error: print(error)
            open("gone", "w").close()
            while not os.path.exists("back"): time.sleep(0.005)
        work()
        message("user", 2)
    """,
            SNAPSHOTD_RECONNECT_S="0.1",
        )
    )
    poll(lambda: running.done() or (gone.exists() and daemon._listener is not None))
    back.touch()
    first, second = running.result(60).stdout.splitlines()
    assert first.startswith("The snapshotd daemon went away during message (")
    assert " did not come back within 0.1 s" in first
    assert second.startswith("The snapshotd daemon cannot be reached at ")
    assert " for " not in second
    (call,) = daemon.calls
    assert daemon.calls[call]["status"] == "done"
    assert [hello.get("calls") for hello in daemon.sent("hello")] == [None, [call]]
    assert [entry["content"] for entry in daemon.conversation] == [2]


def test_a_request_that_kills_every_daemon_is_given_up(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    daemon.deaths, daemon.at_death = {"message": "before"}, lambda pid: daemon.deaths.update(message="before")
    done = run_agent(
        """
        from snapshotd.agent import SnapshotdUnavailable, message
        try: message("user", 1)
        except SnapshotdUnavailable as error: print(error)
    """,
        SNAPSHOTD_RECONNECT_S="0.5",
    )
    assert "went away during message" in done.stdout
    (sent,) = sendings(daemon, "message")
    # at once, then after 20, 40, 80, 160 and the 200 ms that are left
    assert len(sent) <= 7
    assert daemon.conversation == []


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_program_that_starts_while_the_daemon_is_away(
    sandbox: bool, daemon: FakeDaemon, server: FakeDaemon, library: Path, socket_path: Path, run_agent: Run
) -> None:
    """In a sandbox, where the library lies beside the socket, it waits; elsewhere it hears at once that there is
    none."""
    where = shutil.copytree(library, socket_path.parent / "share") if sandbox else library
    daemon.deaths = {"hello": "before"}
    done = run_agent(
        """
        from snapshotd.agent import SnapshotdUnavailable, message
        try: message("user", 1)
        except SnapshotdUnavailable as error: print(error)
    """,
        PYTHONPATH=str(where),
    )
    if sandbox:
        assert done.stdout == ""
        assert [entry["content"] for entry in daemon.conversation] == [1]
    else:
        assert done.stdout.startswith("The snapshotd daemon cannot be reached at ")
        assert daemon.conversation == []


@pytest.mark.parametrize("given", ["0", "0.0"])
def test_no_patience(given: str, daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    daemon.deaths = {"message": "before"}
    done = run_agent(
        """
        from snapshotd.agent import SnapshotdUnavailable, message
        try: message("user", 1)
        except SnapshotdUnavailable as error: print(error)
    """,
        SNAPSHOTD_RECONNECT_S=given,
    )
    assert done.stdout.startswith(
        "The snapshotd daemon went away during message (closed by the daemon), so it is not known"
    )
    assert len(daemon.sent("message")) == 1


def test_questions_are_asked_again_and_others_go_on(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run, tmp_path: Path
) -> None:
    """A thread, a coroutine and a gated call wait for a person on connections of their own while daemons come and
    go."""
    away, ticked = tmp_path / "away", tmp_path / "ticked"

    def at_death(pid: int) -> None:
        away.touch()
        poll(ticked.exists)  # the event loop runs while there is no daemon
        away.unlink()
        ticked.unlink()

    daemon.at_death = at_death
    running = meanwhile(
        lambda: run_agent("""
        import asyncio, os, threading
        from snapshotd.agent import approve, emit, message, tool
        @tool(approve="pay?")
        async def pay(n):
            emit("paid")
            return n
        @tool(approve="sell?")
        def sell(n):
            message("tool", "sold")
            return n
        got = []
        waits = [lambda: got.append(sell(2)), lambda: got.append(bool(approve("sure?")))]
        threads = [threading.Thread(target=wait) for wait in waits]
        for thread in threads: thread.start()
        async def tick():
            while True:
                if os.path.exists("away") and not os.path.exists("ticked"): open("ticked", "w").close()
                await asyncio.sleep(0.005)
        async def main():
            task = asyncio.ensure_future(tick())
            got.append(await pay(3))
            task.cancel()
        asyncio.run(main())
        for thread in threads: thread.join()
        assert sorted(got) == [1, 2, 3], got                # True is 1
        message("user", "last")
    """)
    )
    for _ in range(3):
        poll(lambda: running.done() or len(daemon.waiting) == 3)
        daemon.die()
    poll(lambda: running.done() or len(daemon.waiting) == 3)
    daemon.at_death = lambda pid: None
    daemon.deaths = {"call_end": "after", "output": "after"}
    decide_all(daemon, running)
    # three times here, and for those that were not answered yet when a call's end and its output killed the daemon
    assert [
        4 <= len(sent) <= 6 for sent in sendings_by_call(daemon, "approve") + sendings_by_call(daemon, "call_begin")
    ] == [True] * 3
    assert {call["name"]: call["status"] for call in daemon.calls.values()} == {"pay": "done", "sell": "done"}
    assert [entry["content"] for entry in daemon.conversation] == ["sold", "last"]
    assert [streams["stdout"] for streams in daemon.outputs.values()] == [b"paid"]
    assert daemon.lost == []


def sendings_by_call(daemon: FakeDaemon, op: str) -> list[list[dict[str, Any]]]:
    """`sendings` where several are on their way at the same time."""
    found: dict[str, list[dict[str, Any]]] = {}
    for request in daemon.sent(op):
        sent = {name: value for name, value in request.items() if name != "id"}
        assert sent.pop("again", False) == (request["call"] in found)
        found.setdefault(request["call"], []).append(sent)
        assert sent == found[request["call"]][0]
    return list(found.values())


def test_threads_lose_nothing(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    kinds = iter(["call_begin", "call_end", "message"] * 4)

    def at_death(pid: int) -> None:
        if (op := next(kinds, None)) is not None:
            daemon.deaths[op] = "after"

    daemon.deaths, daemon.at_death = {"call_begin": "before"}, at_death
    run_agent(THREADS)
    assert sorted(call["result"] for call in daemon.named("work")) == list(range(80))
    assert sorted(entry["content"] for entry in daemon.conversation) == list(range(80))
    assert len(daemon.pids) == 14
    assert all(set(hello.get("calls", [])) <= set(daemon.calls) for hello in daemon.sent("hello"))


def test_a_forked_child_waits_too_and_takes_no_calls(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    """Its parent was greeted, so there will be a daemon; the parent's calls stay the parent's."""
    started = threading.Event()
    daemon.at_end = lambda pid: started.is_set() or (started.set(), daemon.die(pid))[0]
    daemon.deaths = {"message": "after"}
    run_agent("""
        import os
        from snapshotd.agent import message, tool
        @tool
        def work():
            message("tool", "parent")
            child = os.fork()
            if not child:
                message("tool", "child")
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            message("tool", "parent again")
        work()
    """)
    assert [entry["content"] for entry in daemon.conversation] == ["parent", "child", "parent again"]
    (call,) = daemon.calls
    assert daemon.calls[call]["status"] == "done"
    hellos = [
        (pid == daemon.calls[call]["pid"], hello.get("calls"))
        for pid, hello in zip(daemon.pids, daemon.sent("hello"), strict=True)
    ]
    assert hellos == [(True, None), (True, [call]), (False, None), (True, [call])]


def test_a_child_that_is_forked_while_the_daemon_is_away(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run, tmp_path: Path
) -> None:
    def at_death(pid: int) -> None:
        poll((tmp_path / "forked").exists)
        time.sleep(0.1)  # long enough for some attempts that find nobody

    daemon.at_death = at_death
    running = meanwhile(
        lambda: run_agent("""
        import os, time
        from snapshotd.agent import message
        from snapshotd.agent.wire.connection import socket_path
        message("user", "parent")
        open("greeted", "w").close()
        while os.path.exists(socket_path()): time.sleep(0.005)
        child = os.fork()
        if not child:
            open("forked", "w").close()
            message("user", "child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)
    )
    poll((tmp_path / "greeted").exists)
    daemon.die()
    running.result(60)
    assert [entry["content"] for entry in daemon.conversation] == ["parent", "child"]
    assert [hello.get("again") for hello in daemon.sent("hello")] == [None, None]


def test_an_interrupt_waits_until_the_daemon_is_back(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    daemon.deaths, daemon.at_death = {"call_end": "before"}, lambda pid: os.kill(pid, signal.SIGINT)
    done = run_agent("""
        from snapshotd.agent import message, tool
        @tool
        def work(): return 1
        try:
            work()
        except KeyboardInterrupt:
            print("interrupted")
        message("user", "still connected")
    """)
    assert done.stdout == "interrupted\n"
    assert daemon.named("work")[0]["status"] == "done"
    assert len(daemon.pids) == 2


def test_a_program_that_closes_every_descriptor_keeps_its_calls(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run
) -> None:
    run_agent("""
        import os
        from snapshotd.agent import message, tool
        @tool
        def work():
            os.closerange(3, 100)
            message("tool", 1)
        work()
    """)
    (call,) = daemon.calls
    assert daemon.calls[call]["status"] == "done"
    assert daemon.sent("hello")[1]["calls"] == [call]
    assert [len(sent) for sent in sendings(daemon, "message")] == [1]  # it was not sent before


def test_a_holder_keeps_its_call(daemon: FakeDaemon, server: FakeDaemon, shell: Shell) -> None:
    call = shell("snapshotd-agent begin work").stdout.strip()
    for count in range(1, 4):
        daemon.die()
        poll(lambda count=count: len(daemon.sent("hello")) == count + 1)  # type: ignore[misc] # at once: nobody else speaks for the call
        shell(f"printf {count} | snapshotd-agent output {call}")
    daemon.deaths = {"output": "after", "call_end": "answering"}
    shell(f"printf 4 | snapshotd-agent output {call}; snapshotd-agent end {call} --result 5")
    assert daemon.outputs == {call: {"stdout": b"1234", "stderr": b""}}
    assert (daemon.calls[call]["status"], daemon.calls[call]["result"]) == ("done", 5)
    assert [hello.get("calls") for hello in daemon.sent("hello")] == [None] + [[call]] * 5
    assert daemon.lost == []


def test_the_command(daemon: FakeDaemon, server: FakeDaemon, shell: Shell) -> None:
    """Questions to a person on connections of their own: a command's process has a parent in this sandbox, so it is not
    parked."""
    daemon.deaths = {"output": "before", "call_end": "after"}
    running = meanwhile(
        lambda: shell("""
        snapshotd-agent run say --approve -- sh -c 'echo said; exit 3' || echo "exit $?"
        call=$(snapshotd-agent begin pay --question "Really?")
        snapshotd-agent end "$call" > /dev/null
        snapshotd-agent approve "Sure?"
    """)
    )
    for _ in range(3):
        question = daemon.question()
        daemon.die()
        again = daemon.question()
        assert {**question, "decision": 0} == {**again, "decision": 0}
        daemon.decide(again, True)
    assert running.result(60).stdout == "said\nexit 3\n"
    assert [(call["name"], call["status"]) for call in daemon.calls.values()] == [("say", "done"), ("pay", "done")]
    assert [streams["stdout"] for streams in daemon.outputs.values()] == [b"said\n"]


def test_a_process_outside_that_was_never_greeted_does_not_wait(tmp_path: Path, run_agent: Run) -> None:
    (tmp_path / "left.sock").touch()
    done = run_agent(
        """
        import time
        from snapshotd.agent import SnapshotdUnavailable, message
        def unexpected(seconds): raise SystemExit("waits")
        time.sleep = unexpected
        for _ in range(2):
            try: message("user", 1)
            except SnapshotdUnavailable as error: print(error)
    """,
        SNAPSHOTD_AGENT_SOCKET=str(tmp_path / "left.sock"),
    )
    assert [line.startswith("The snapshotd daemon cannot be reached at ") for line in done.stdout.splitlines()] == [
        True,
        True,
    ]


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
