"""The in-sandbox library: agents in subprocesses, what they record and what they notice of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotd.errors import OutOfSpace
from tests.agent_daemon import FakeDaemon
from tests.agent_peer import PAGE
from tests.unit.agent.library.programs import THREADS

pytestmark = pytest.mark.usefixtures("server")
Run = Callable[..., Any]


def test_a_sync_tool_is_recorded_before_and_after_it_runs(recorder: Any, run_agent: Run) -> None:
    done = run_agent("""
        from snapshotd.agent import tool
        @tool
        def add(a, b=2, *rest, **more):
            print("running")
            return {"sum": a + b, "rest": rest}
        print(add(1, 5, 7, x={"y": None}))
    """)
    assert done.stdout == "running\n{'sum': 6, 'rest': (7,)}\n"
    assert done.stderr == ""
    (call,) = recorder.calls.values()
    assert call["name"] == "add"
    assert call["arguments"] == {"a": 1, "b": 5, "rest": [7], "more": {"x": {"y": None}}}
    assert (call["status"], call["error"], call["exit_code"]) == ("done", None, None)
    assert call["result"] == {"sum": 6, "rest": [7]}
    assert recorder.events == [("begin", "add"), ("end", "add", "done")]


def test_the_call_returns_only_after_the_snapshot(recorder: Any, run_agent: Run, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    seen: list[bool] = []
    recorder.at_end = lambda pid: seen.append(marker.exists())
    run_agent("""
        from snapshotd.agent import tool
        @tool
        def work(): pass
        work()
        open("marker", "w").close()
    """)
    assert seen == [False]
    assert marker.exists()


def test_names_methods_and_decorators(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import functools
        from snapshotd.agent import tool
        class Box:
            @tool(name="box open")
            def open(self, key): return key
            @tool
            @classmethod
            def made(cls, n): return n
            @tool
            @staticmethod
            def plain(x): return x
        assert Box().open("k") == "k" and Box.made(3) == 3 and Box.plain(4) == 4
        assert tool(functools.partial(max, 1))(2) == 2
        assert Box.open.__name__ == "open"
        try:
            tool(name="a" + chr(10))(len)
        except ValueError as error:
            assert "printable" in str(error)
        else:
            raise SystemExit("accepted a name with a newline")
    """)
    assert [(call["name"], call["arguments"]) for call in recorder.calls.values()] == [
        ("box open", {"key": "k"}),
        ("made", {"n": 3}),
        ("plain", {"x": 4}),
        ("partial", {"args": [2], "kwargs": {}}),
    ]


def test_an_exception_is_recorded_and_passes_unchanged(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import subprocess, sys
        from snapshotd.agent import tool
        class Odd(Exception):
            def __str__(self): raise RuntimeError("no text")
        errors = [KeyError("k"), ValueError(), Odd(), SystemExit(3), KeyboardInterrupt(), subprocess.CalledProcessError(-9, "cmd")]
        @tool
        def fail(number): raise errors[number]
        for number, error in enumerate(errors):
            try:
                fail(number)
            except BaseException as got:
                assert got is error, got
                assert got.__context__ is None and got.__cause__ is None
            else:
                raise SystemExit("no exception")
        try:
            fail(1, 2)
        except TypeError:
            pass
    """)
    calls = list(recorder.calls.values())
    assert [call["status"] for call in calls] == ["failed"] * 7
    assert [call["error"] for call in calls[:2]] == ["KeyError: 'k'", "ValueError"]
    assert calls[2]["error"] == "Odd: <Odd whose repr raised RuntimeError>" or calls[2]["error"] == "Odd: Odd()"
    assert [call["error"] for call in calls[3:5]] == ["SystemExit: 3", "KeyboardInterrupt"]
    assert calls[5]["exit_code"] == 137
    assert calls[6]["arguments"] == {"args": [1, 2], "kwargs": {}}
    assert calls[6]["error"].startswith("TypeError: ")


def test_subprocess_results_carry_output_and_exit_code(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import subprocess
        from snapshotd.agent import tool
        shell = tool(name="shell")(subprocess.run)
        shell("echo out; echo err >&2; exit 3", shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    """)
    (call,) = recorder.named("shell")
    assert call["exit_code"] == 3
    assert call["status"] == "done"
    assert (call["result"]["stdout"], call["result"]["stderr"]) == ("out\n", "err\n")


def test_async_tools_and_gather(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import asyncio, functools, inspect
        from snapshotd.agent import tool
        @tool
        async def slow(n, gate, own):
            own.set()
            await gate.wait()
            return n * n
        def hidden(function):
            @functools.wraps(function)
            def inner(*args): return function(*args)
            return inner
        @tool
        @hidden
        async def behind(n):
            await asyncio.sleep(0)
            return n
        @tool
        async def cancelled():
            await asyncio.sleep(60)
        async def main():
            assert inspect.iscoroutinefunction(slow)
            events = [asyncio.Event() for _ in range(5)]
            # each waits until the next one is inside: all four are open at the same time
            assert await asyncio.gather(*(slow(n, events[n + 1], events[n]) for n in range(4)), later(events[4])) == [0, 1, 4, 9, None]
            assert await behind(5) == 5
            task = asyncio.ensure_future(cancelled())
            await asyncio.sleep(0)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
        async def later(event):
            await asyncio.sleep(0)
            event.set()
        asyncio.run(main())
    """)
    assert sorted(call["result"] for call in recorder.named("slow")) == [0, 1, 4, 9]
    assert recorder.events[:4] == [("begin", "slow")] * 4
    assert recorder.named("behind")[0]["result"] == 5
    assert recorder.named("cancelled")[0]["error"] == "CancelledError"


def test_generators(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import asyncio
        from snapshotd.agent import tool
        @tool
        def note(): return "noted"
        @tool
        def count(n):
            got = []
            for i in range(n):
                try:
                    got.append((yield i))
                except KeyError as error:
                    got.append(repr(error))
            return got
        @tool
        async def acount(n):
            for i in range(n):
                yield i
        source = count(3)
        assert next(source) == 0
        note()                                  # the consumer's own tool call is not part of the generator's
        assert source.send("a") == 1 and source.throw(KeyError("b")) == 2
        try:
            source.send("c")
        except StopIteration as stop:
            assert stop.value == ["a", "KeyError('b')", "c"]
        early = count(9)
        next(early)
        early.close()
        async def main():
            assert [i async for i in acount(3)] == [0, 1, 2]
        asyncio.run(main())
    """)
    first, early = recorder.named("count")
    assert first["result"] == {"items": [0, 1, 2], "return": ["a", "KeyError('b')", "c"]}
    assert (early["status"], early["result"]) == ("done", {"items": [0], "return": None})
    assert recorder.named("acount")[0]["result"] == {"items": [0, 1, 2]}
    assert recorder.named("note")[0]["status"] == "done"


def test_a_tool_in_a_tool_is_part_of_the_outer_one(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import asyncio
        from snapshotd.agent import tool
        @tool
        def inner(): return 1
        @tool
        async def ainner(): return inner() + 1
        @tool
        def outer(): return inner() + asyncio.run(ainner())
        left = []
        @tool
        async def leaves_a_task():
            gate = asyncio.Event()
            async def late():
                await gate.wait()
                inner()
            left.extend([gate, asyncio.ensure_future(late())])
        async def main():
            await leaves_a_task()
            left[0].set()
            await left[1]
        assert outer() == 3
        asyncio.run(main())
        inner()
    """)
    # the task that outlives its tool calls inner() on its own
    assert [call["name"] for call in recorder.calls.values()] == ["outer", "leaves_a_task", "inner", "inner"]


def test_threads_in_parallel(recorder: Any, run_agent: Run) -> None:
    run_agent(THREADS)
    assert sorted(call["result"] for call in recorder.named("work")) == list(range(80))
    assert sorted(entry["content"] for entry in recorder.conversation) == list(range(80))
    assert len(recorder.pids) == 1


def test_messages_and_checkpoint(recorder: Any, run_agent: Run) -> None:
    recorder.conversation.append({"role": "system", "content": "inherited"})
    done = run_agent("""
        from snapshotd.agent import checkpoint, message, messages
        message("user", "h\\u00e9llo \\U0001f600")
        message("tool", {"big": "x" * 3000000})
        for n in range(40):
            message("assistant", [n, None, 1.5, {"k": True}])
        found = messages()
        assert len(found) == 43, len(found)
        assert found[0] == {"role": "system", "content": "inherited"}
        assert found[1]["content"] == "h\\u00e9llo \\U0001f600"
        assert found[2]["content"] == {"big": "x" * 3000000}
        assert [entry["content"][0] for entry in found[3:]] == list(range(40))
        print(checkpoint("before the edit"))
    """)
    assert done.stdout == f"{1:032x}\n"
    assert recorder.events == [("checkpoint", "before the edit")]


def test_exactly_one_page_of_messages(recorder: Any, run_agent: Run) -> None:
    recorder.conversation.extend({"role": "user", "content": number} for number in range(PAGE))
    run_agent(f"""
        from snapshotd.agent import messages
        assert len(messages()) == {PAGE}
    """)


def test_large_results_are_streamed(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import tool
        @tool
        def read(): return "\\u00e9" * 10000000
        @tool
        def small(): return "x" * 30000
        read(); small()
    """)
    assert recorder.named("read")[0]["result"] == "é" * 10_000_000
    assert recorder.named("read")[0]["body_bytes"] == 20_000_002
    assert recorder.named("small")[0]["body_bytes"] is None
    assert recorder.named("small")[0]["result"] == "x" * 30_000


def test_a_result_over_the_limit_is_named_and_the_agent_goes_on(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import tool
        @tool
        def read(): return "x" * (65 << 20)
        assert len(read()) == 65 << 20
    """)
    assert "over the limit" in recorder.named("read")[0]["result"]


def test_arguments_that_are_not_json(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import tool
        class Odd:
            def __repr__(self): raise RuntimeError
        loop = []
        loop.append(loop)
        bush = ["leaf"]
        for _ in range(200):
            bush = [bush, bush]                 # exponentially many paths
        @tool
        def take(**values): pass
        take(odd=Odd(), data=b"\\xff", path="\\udc80", nan=float("nan"), huge=10 ** 5000, key={1: {(2, 3): 4}}, many={5})
        @tool
        def deep(loop, bush, long, numbers): pass
        deep(loop, bush, "y" * 1000000, list(range(100000)))
        @tool
        def wide(*a, **k): pass
        wide(**{"k%d" % n: "z" * 60000 for n in range(100)})
        @tool
        def parameters(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o): pass
        parameters(*["z" * 60000] * 15)
    """)
    values = recorder.named("take")[0]["arguments"]["values"]
    assert values["odd"] == "<Odd whose repr raised RuntimeError>"
    assert (values["data"], values["path"], values["nan"]) == ("b'\\xff'", "\\udc80", "nan")
    assert values["key"] == {"1": {"(2, 3)": 4}}
    assert values["many"] == "{5}"
    assert isinstance(values["huge"], str)
    deep = recorder.named("deep")[0]["arguments"]
    assert all(len(json.dumps(value)) <= 80 << 10 for value in deep.values())
    assert deep["long"].startswith("yyy")
    assert "1000000 bytes, sha256" in deep["long"]
    assert "sha256" in recorder.named("wide")[0]["arguments"]["k"]
    many = recorder.named("parameters")[0]["arguments"]
    assert len(many) == 15
    assert len(json.dumps(many)) <= 1 << 20


def test_outside_a_sandbox_everything_runs_with_one_line_of_warning(
    recorder: Any, run_agent: Run, tmp_path: Path
) -> None:
    done = run_agent(
        """
        import asyncio, os
        from snapshotd.agent import checkpoint, message, messages, tool
        @tool
        def work(n): return n
        @tool
        async def awork(n): return work(n)
        @tool
        def items(): yield from (1, 2)
        @tool
        async def aitems():
            yield 3
        async def main():
            return [await awork(4)] + [i async for i in aitems()]
        message("user", {"a": (1, 2)})
        print(work(1), list(items()), asyncio.run(main()), messages(), checkpoint("x"))
        child = os.fork()
        work(2)
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    """,
        SNAPSHOTD_AGENT_SOCKET=str(tmp_path / "nowhere" / "agent.sock"),
    )
    assert done.stdout == "1 [1, 2] [4, 3] [{'role': 'user', 'content': {'a': [1, 2]}}] None\n"
    assert done.stderr.count("\n") == 1
    assert "nothing is recorded" in done.stderr
    assert not recorder.pids


def test_importing_alone_says_nothing(run_agent: Run, tmp_path: Path) -> None:
    done = run_agent(
        "from snapshotd.agent import tool\n@tool\ndef f(): pass", SNAPSHOTD_AGENT_SOCKET=str(tmp_path / "none")
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_a_sandbox_whose_daemon_is_away_is_not_outside(library: Path, run_agent: Run) -> None:
    done = run_agent(
        """
        from snapshotd.agent import SnapshotdUnavailable, tool
        @tool
        def work(): print("ran")
        try:
            work()
        except SnapshotdUnavailable as error:
            print(error)
    """,
        SNAPSHOTD_AGENT_SOCKET=str(library / "agent.sock"),
        SNAPSHOTD_RECONNECT_S="0.1",
    )
    assert done.stdout.startswith("The snapshotd daemon cannot be reached at ")
    assert "ran" not in done.stdout


def test_a_forked_child_has_its_own_connection(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import multiprocessing, os
        from snapshotd.agent import tool
        @tool
        def work(n): return [n, os.getpid()]
        def main():
            work(0)
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=work, args=(n,)) for n in (1, 2, 3)]
            for child in children: child.start()
            for child in children:
                child.join()
                assert child.exitcode == 0
            work(4)
        main()
    """)
    results = {call["result"][0]: (call["result"][1], call["pid"]) for call in recorder.named("work")}
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert all(inside == peer for inside, peer in results.values())
    assert len({pid for pid, _ in results.values()}) == 4
    assert len(recorder.pids) == 4


def test_a_child_forked_inside_a_tool_is_part_of_it(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import os
        from snapshotd.agent import tool
        @tool
        def inner(): pass
        @tool
        def outer():
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
            inner()
            return child
        if not outer():
            os._exit(0)                         # the child returned from the tool too, and recorded nothing
    """)
    assert recorder.events == [("begin", "outer"), ("end", "outer", "done")]
    assert len(recorder.pids) == 1


def test_the_daemon_goes_away_in_the_middle(server: FakeDaemon, recorder: Any, run_agent: Run) -> None:
    recorder.at_end = lambda pid: server.close()
    done = run_agent(
        """
        from snapshotd.agent import SnapshotdUnavailable, message, tool
        @tool
        def work(): return 1
        for attempt in (work, work, lambda: message("user", 1)):
            try:
                attempt()
            except SnapshotdUnavailable as error:
                print(error)
            else:
                raise SystemExit("nothing was raised")
    """,
        SNAPSHOTD_RECONNECT_S="0",
    )
    first, second, third = done.stdout.splitlines()
    assert first.startswith("The snapshotd daemon went away during call_end (")
    assert second.startswith("The snapshotd daemon cannot be reached at ")
    assert third.startswith("The snapshotd daemon cannot be reached at ")
    assert done.stderr == ""


def test_the_daemons_refusals_reach_the_agent(recorder: Any, run_agent: Run) -> None:
    recorder.refuse["call_begin"] = OutOfSpace("The disk is full; free some space.")
    recorder.refuse["checkpoint"] = RuntimeError("a defect")
    done = run_agent("""
        from snapshotd.agent import SnapshotdError, checkpoint, message, tool
        @tool
        def work(): print("ran")
        try:
            work()
        except SnapshotdError as error:
            print(error.code, error)
        try:
            checkpoint("x")
        except SnapshotdError as error:
            print(error.code)
        try:
            message("ro" + chr(10) + "le", 1)   # refused, and the connection with it
        except SnapshotdError as error:
            print(error.code)
        message("user", 2)
    """)
    assert done.stdout.splitlines() == ["OutOfSpace The disk is full; free some space.", "InternalError", "UsageError"]
    assert [entry["content"] for entry in recorder.conversation] == [2]


def test_a_program_that_closes_every_descriptor(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import os
        from snapshotd.agent import tool
        @tool
        def work(n): return n
        work(1)
        os.closerange(3, 100)
        victims = [open("victim%d" % n, "w") for n in range(5)]
        work(2)
        work(3)
        for n, victim in enumerate(victims):
            victim.write("mine")
            victim.close()
            assert open("victim%d" % n).read() == "mine"
    """)
    assert [call["result"] for call in recorder.named("work")] == [1, 2, 3]


def test_standard_streams_that_are_closed_do_not_become_the_socket(recorder: Any, run_agent: Run) -> None:
    run_agent("""
        import os
        from snapshotd.agent import tool
        os.close(0); os.close(1)
        @tool
        def work(): return os.listdir("/proc/self/fd")
        work()
        try:
            os.write(1, b"garbage on the socket?")
        except OSError:
            pass
        work()
    """)
    assert [call["status"] for call in recorder.named("work")] == ["done", "done"]


def test_an_interrupt_waits_for_the_answer(recorder: Any, run_agent: Run) -> None:
    def interrupt(pid: int) -> None:
        os.kill(pid, 2)

    recorder.at_end = interrupt
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
    assert recorder.named("work")[0]["status"] == "done"
    assert len(recorder.pids) == 1


def test_a_generator_collected_in_the_middle_of_a_request_does_not_hang(run_agent: Run) -> None:
    run_agent("""
        import gc
        from snapshotd.agent import message, tool
        @tool
        def stream():
            yield 1
        gc.set_threshold(1)
        for _ in range(200):
            cycle = [stream()]
            next(cycle[0])
            cycle.append(cycle)
            del cycle
            message("user", {"x": [1, 2, 3]})
    """)


def test_long_socket_paths(run_agent: Run, tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with FakeDaemon().serving(folder / "agent.sock") as recorder:
        run_agent(
            "from snapshotd.agent import message\nmessage('user', 1)", SNAPSHOTD_AGENT_SOCKET=str(folder / "agent.sock")
        )
    assert len(recorder.conversation) == 1
