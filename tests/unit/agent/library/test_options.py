"""What `@tool` is told: side effects, idempotency keys, approvals, compensations; and the output of a call that
runs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from library_rig import PYTHON, meanwhile

from tests.agent_daemon import FakeDaemon

Run = Callable[..., Any]


def test_options_are_sent_with_the_intent(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import current_call, tool
        @tool(side_effect="irreversible", key="order-{number}", compensate=["cancel", "--now"], name="order food")
        def order(number, dish="rice"): return current_call().key
        @tool(side_effect="idempotent", key=lambda number, dish="rice": "%s/%s" % (number, dish))
        def other(number, dish="rice"): return current_call().key
        @tool
        def plain(): return current_call().key
        assert current_call() is None
        assert order(7) == "order-7" and other(7) == "7/rice"
        key = plain()
        assert len(key) == 32 and current_call() is None
    """)
    first, second, third = daemon.sent("call_begin")
    assert (first["name"], first["side_effect"], first["key"]) == ("order food", "irreversible", "order-7")
    assert first["compensate"] == {"argv": ["cancel", "--now"]}
    assert (second["side_effect"], second["key"]) == ("idempotent", "7/rice")
    assert not {"side_effect", "key", "approve", "compensate", "kind", "task", "parked"} & set(third)


def test_options_that_make_no_sense_are_refused_at_once(server: FakeDaemon, run_agent: Run) -> None:
    said = run_agent("""
        import functools
        from snapshotd.agent import tool
        def function(call): pass
        def outer():
            def inner(call): pass
            return inner
        gone = function
        alias = function
        class Box:
            @staticmethod
            def undo(call): pass
        @tool(compensate=alias)
        def fine(): pass
        for options in [dict(side_effect="huge"), dict(approve=3), dict(approve=" "), dict(key=5), dict(compensate="rm -r x"),
                        dict(compensate=[]), dict(compensate=["a", 1]), dict(compensate=outer()),
                        dict(compensate=lambda call: 1), dict(compensate=Box.undo),
                        dict(compensate=functools.partial(function)), dict(compensate=print), dict(name="")]:
            try:
                @tool(**options)
                def work(): pass
            except (TypeError, ValueError) as error:
                assert "work" in str(error) or "name" in str(error), error
            else:
                raise SystemExit("accepted %r" % options)
        try:
            @tool(key="")
            def empty(): print("ran")
            empty()
        except ValueError as error:
            print(error)
    """).stdout
    assert said == "The idempotency key of empty has 1 to 200 printable characters; '' does not.\n"


def test_calls_within_a_call_have_keys_of_their_own(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    said = run_agent("""
        from snapshotd.agent import SnapshotdError, current_call, emit, tool
        @tool
        def inner():
            emit("from the inner one")
            return current_call().key
        @tool(side_effect="irreversible")
        def pay(): print("paid")
        @tool(approve=True)
        def gated(): print("ran")
        @tool
        def outer():
            own = current_call().key
            keys = [inner(), inner()]
            assert len({own, *keys}) == 3 and all(key.startswith(own) for key in keys)
            for other in (pay, gated):
                try: other()
                except SnapshotdError as error: print(error.code)
        outer()
    """).stdout
    assert said == "Conflict\nConflict\n"
    (call,) = daemon.calls
    assert daemon.outputs[call]["stdout"] == b"from the inner one" * 2


def test_emit(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import emit, tool
        emit("nobody hears this")
        @tool
        def work():
            emit("h\\u00e9 \\udc80")
            emit(b"\\xff" * 1500000, "stderr")
            try: emit("x", stream="out")
            except ValueError: pass
            else: raise SystemExit("accepted")
        work()
    """)
    ((_, streams),) = daemon.outputs.items()
    assert streams == {"stdout": "hé \\udc80".encode(), "stderr": b"\xff" * 1_500_000}


def test_an_approved_call_runs_and_a_denied_one_does_not(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run
) -> None:
    running = meanwhile(
        lambda: run_agent("""
        from snapshotd.agent import Denied, SnapshotdError, tool
        @tool(approve="Really pay?", side_effect="irreversible")
        def pay(amount): return amount
        @tool
        def listed(): print("ran")
        assert pay(1) == 1
        try: pay(2)
        except Denied as error: print(error.code, error)
        assert issubclass(Denied, SnapshotdError)
        try: listed()
        except Denied as error: print(error)
        assert pay(3) == 3
    """)
    )
    daemon.gated.add("listed")  # by the policy alone
    for approved in (True, False, False, True):
        question = daemon.question()
        daemon.decide(question, approved, reason="too much")
    assert running.result(60).stdout == "Denied pay was denied: too much\nlisted was denied: too much\n"
    assert [call["status"] for call in daemon.named("pay")] == ["done", "done"]
    assert [request["approve"] for request in daemon.sent("call_begin") if request["name"] == "pay"] == [
        "Really pay?"
    ] * 3


def test_the_approver_may_change_the_arguments(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    running = meanwhile(
        lambda: run_agent("""
        from snapshotd.agent import tool
        marker = object()
        class Box:
            @tool(approve=True)
            def put(self, a, b=2, *rest, c=3, odd=None, **more):
                assert isinstance(self, Box) and odd is marker        # what was not changed is the same object
                return [a, b, list(rest), c, more]
        for _ in range(3):
            try: print(Box().put(1, 2, 9, odd=marker, x=1))
            except TypeError as error: print("TypeError", error)
        @tool(approve=True)
        def generated(n): yield n
        print(list(generated(1)))
    """)
    )
    sent = daemon.question()
    edited = {**sent["arguments"], "a": 10, "rest": [7, 8], "c": 30, "more": {"y": 2}}
    daemon.decide(sent, True, arguments=edited)
    for arguments in ({**edited, "nonsense": 1}, [1, 2]):
        daemon.decide(daemon.question(), True, arguments=arguments)
    daemon.decide(daemon.question(), True, arguments={"n": 5})
    lines = running.result(60).stdout.splitlines()
    assert lines[0] == "[10, 2, [7, 8], 30, {'y': 2}]"
    assert lines[1].startswith("TypeError put has no parameter 'nonsense'")
    assert lines[2].startswith("TypeError The arguments that the approver gave to put")
    assert lines[3] == "[5]"
    assert [call["status"] for call in daemon.calls.values()] == ["done", "failed", "failed", "done"]


def test_others_go_on_while_a_person_is_asked(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run, tmp_path: Path
) -> None:
    """Threads and tasks of an event loop make calls while two tools and a question wait."""
    running = meanwhile(
        lambda: run_agent("""
        import asyncio, threading
        from snapshotd.agent import approve, tool
        @tool
        def quick(n): return n
        @tool(approve=True)
        def slow(n): return n
        @tool(approve=True)
        async def aslow(n): return n
        got = []
        waits = [lambda: got.append(slow(1)), lambda: got.append(bool(approve("sure?")))]
        threads = [threading.Thread(target=wait) for wait in waits]
        for thread in threads: thread.start()
        async def main():
            task = asyncio.ensure_future(aslow(2))
            cancelled = asyncio.ensure_future(aslow(3))
            for n in range(20):
                await asyncio.sleep(0)
                assert quick(n) == n
            cancelled.cancel()
            try: await cancelled
            except asyncio.CancelledError: pass
            open("went-on", "w").close()
            got.append(await task)
        asyncio.run(main())
        for thread in threads: thread.join()
        assert sorted(got) == [1, 1, 2], got      # True is 1
        assert quick(0) == 0
    """)
    )
    marker = tmp_path / "went-on"
    while not marker.exists():
        assert not running.done(), running.result()
    deadline = time.monotonic() + 60
    while not running.done():
        assert time.monotonic() < deadline
        if daemon.waiting:
            daemon.decide(daemon.question(), True)
        time.sleep(0.005)
    running.result(60)
    assert len(daemon.named("quick")) == 21
    assert {call["status"] for call in daemon.named("slow") + daemon.named("quick")} == {"done"}


def test_approve_returns_the_decision(
    daemon: FakeDaemon, server: FakeDaemon, run_agent: Run, socket_path: Path
) -> None:
    program = """
        from snapshotd.agent import approve
        first = approve("Deploy?", {"to": ["prod"]}, expires_s=60)
        print(bool(first), first.by, first.answer, first.reason)
        second = approve("Really?")
        print(bool(second), second.by, second.reason)
    """
    running = meanwhile(lambda: run_agent(program))
    question = daemon.question()
    assert (question["question"], question["details"], question["expires_s"]) == ("Deploy?", {"to": ["prod"]}, 60)
    daemon.decide(question, True, by="ada", answer="carefully")
    daemon.decide(daemon.question(), False, by="bob", reason="no")
    said = running.result(60).stdout
    assert said == "True ada carefully None\nFalse bob no\n"
    server.close()
    with daemon.resumed().serving(socket_path):
        assert run_agent(program).stdout == said


def test_outside_of_a_sandbox_gated_tools_need_a_terminal(run_agent: Run, tmp_path: Path, library: Path) -> None:
    program = tmp_path / "gated.py"
    program.write_text("""
from snapshotd.agent import Denied, approve, current_call, tool
@tool(approve="Really?", key="k-{n}")
def pay(n): return current_call().key
try: print(pay(1))
except Denied as error: print("denied", error)
print(bool(approve("Sure?")))
""")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(library),
        "SNAPSHOTD_AGENT_SOCKET": str(tmp_path / "none"),
    }

    def run(stdin: int, stderr: int) -> str:
        done = subprocess.run(
            [PYTHON, str(program)],
            env=environment,
            stdin=stdin,
            stderr=stderr,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    assert run(subprocess.DEVNULL, subprocess.DEVNULL) == (
        "denied pay was not approved: outside of a sandbox somebody has to be at the terminal\nFalse\n"
    )
    terminal, peer = os.openpty()
    try:
        os.write(terminal, b"y\nno way\n")
        assert run(peer, peer) == "k-1\nFalse\n"
    finally:
        os.close(terminal)
        os.close(peer)
