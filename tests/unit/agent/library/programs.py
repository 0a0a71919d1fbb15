"""Programs of agents that several tests run, live and in a replay."""

from __future__ import annotations

OUTCOMES = """
    import asyncio, contextlib, json, os, subprocess, sys
    from snapshotd.agent import ReplayedError, tool

    class Mine(Exception): pass
    class Picky(Exception):
        def __init__(self, message, *, response):
            super().__init__(message)
            self.response = response

    ran = []
    seen = []
    def note(value): seen.append(value)

    @tool
    def add(a, b=1):
        ran.append("add")
        return {"sum": a + b}
    @tool
    async def aadd(a):
        ran.append("aadd")
        return [a]
    def hidden(function):
        import functools
        @functools.wraps(function)
        def inner(*args): return function(*args)
        return inner
    @tool
    @hidden
    async def behind(n):
        ran.append("behind")
        return n
    @tool
    def big():
        ran.append("big")
        return "x" * 100000
    @tool
    def count(n):
        ran.append("count")
        for i in range(n):
            yield {"i": i}
        if n == 3:
            raise ValueError("three")
        return "end"
    @tool
    async def acount(n):
        ran.append("acount")
        for i in range(n): yield i
    @tool
    def fail(which):
        ran.append("fail")
        raise {
            "value": ValueError("bad value"), "key": KeyError("k"), "empty": ValueError(), "mine": Mine("own"),
            "picky": Picky("told so", response=4), "missing": FileNotFoundError(2, "No such file or directory", "/x"),
            "exit": SystemExit(3), "unicode": UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        }[which]
    @tool
    def fails_with_a_local_type():
        ran.append("local")
        class Local(Exception): pass
        raise Local("nobody has it")
    shell = tool(name="shell")(subprocess.run)

    async def main():
        note(await aadd(5)); note(await behind(6))
        note([i async for i in acount(2)])
    note(add(1, b=2)); note(big() == "x" * 100000)
    asyncio.run(main())
    source = count(2)
    note([next(source), next(source)])
    try: next(source)
    except StopIteration as stop: note(stop.value)
    items = []
    try:
        for item in count(3): items.append(item)
    except ValueError as error: note([items, str(error)])
    for which, kind in [("value", ValueError), ("key", KeyError), ("empty", ValueError), ("mine", Mine), ("picky", Picky),
                        ("missing", FileNotFoundError), ("exit", SystemExit), ("unicode", UnicodeDecodeError)]:
        try: fail(which)
        except kind as error: note([kind.__name__, str(error)])
    try: fail("missing")
    except OSError as error: note([error.errno, error.filename])
    try: fail("exit")
    except SystemExit as error: note(error.code)
    try: fails_with_a_local_type()
    except ReplayedError as error: note(["local", error.type_name, str(error)])
    except Exception as error: note(["local", type(error).__name__, str(error)])
    done = shell(["sh", "-c", "printf 'a\\\\377'; exit 3"], stdout=subprocess.PIPE)
    note([type(done).__name__, done.returncode, repr(done.stdout), done.stderr])
    note(shell(["echo", "t"], stdout=subprocess.PIPE, universal_newlines=True).stdout)
    try: shell(["sh", "-c", "echo out; kill -9 $$"], stdout=subprocess.PIPE, check=True)
    except subprocess.CalledProcessError as error: note([error.returncode, error.cmd, repr(error.stdout)])
    try: shell(["sh", "-c", "exit 200"], check=True)
    except subprocess.CalledProcessError as error: note([error.returncode, error.cmd])
    try: shell(["sleep", "60"], timeout=0.01)
    except subprocess.TimeoutExpired as error: note(["timeout", error.timeout])
    print(json.dumps(seen))
    print(json.dumps(ran))
"""
STEPS = """
    import sys
    from snapshotd.agent import checkpoint, message, now, random, randint, state, tool, uuid
    @tool
    def step(n):
        print("ran", n)
        state["last"] = n
        return n
    print(now(), random(), randint(1, 1 << 40), uuid())
    message("user", "go")
    for n in range(int(sys.argv[1]) if sys.argv[1:] else LAST):
        step(n)
        assert state["last"] == n, dict(state)
        if n == 1: print(checkpoint("one"))
    print(state["last"])
"""

STORE = """
    from snapshotd.agent import SnapshotdError, store
    assert store.get("k") is None and store.get("k", 7) == 7 and store.entry("k") is None
    assert store.put("k", {"color": "red"}) == 1
    assert store.put("k", {"color": "blue"}, expected_version=1) == 2
    assert store.get("k")["color"] == "blue" and store.get("k", version=1)["color"] == "red" and store.get("k", version=9) is None
    assert store.entry("k") == ("k", {"color": "blue"}, 2, "default")
    assert store.put("k", 5, namespace="other") == 1
    store.put("l", {"color": "blue"}); store.put("m", {"color": "red"})
    assert [entry.key for entry in store.search()] == ["k", "l", "m"]
    assert [entry.key for entry in store.search(limit=1)] == ["k"]
    assert [entry.key for entry in store.search("l")] == ["l"] and [entry.key for entry in store.search("", after="l", limit=1)] == ["m"]
    assert [entry.key for entry in store.search(where={"color": "blue"})] == ["k", "l"]
    def conflict(function):
        try: function()
        except SnapshotdError as error: return error.code
        raise SystemExit("accepted")
    assert conflict(lambda: store.put("k", 1, expected_version=0)) == "Conflict"
    assert conflict(lambda: store.delete("k", expected_version=1)) == "Conflict"
    assert conflict(lambda: store.delete("absent")) == "NotFound"
    store.delete("k", expected_version=2)
    assert store.get("k") is None and store.get("k", namespace="other") == 5
    assert store.put("k", "again", expected_version=0) == 4
    store.put("brief", 1, ttl_s=3600)
    store.put("large", "x" * 100000)
    assert len(store.get("large")) == 100000
    for value in ({1}, float("inf")):
        try: store.put("k", value)
        except (TypeError, ValueError): pass
        else: raise SystemExit("accepted")
"""
TASKS = """
    import asyncio
    from snapshotd.agent import SnapshotdError, model, task, tasks, tool
    @tool
    def step(n): print("step", n); return n
    @task
    def build(n):
        print("build")
        return {"built": step(n)}
    @task("test it", depends=["build"])
    async def check(n):
        print("check")
        return step(n)
    @task("optional")
    def optional():
        task.skip("not today")
    @task("broken")
    def broken():
        step(3)
        raise ValueError("no")
    task.plan("build", "test it", "with")
    with_plan = [entry["status"] for entry in tasks()]
    print(build(1))
    print(asyncio.run(check(2)))
    with task("with", depends=["build", "test it"]) as t:
        step(4)
        t.result = [5]
    print(optional())
    with task("outer") as outer:
        with task("inner"):
            outer.skip("both")
        raise SystemExit("not skipped")
    try: broken()
    except ValueError as error: print("broken", error)
    for needed in ("broken", "optional", "nobody"):
        try:
            with task("late", depends=[needed]): print("ran")
        except SnapshotdError as error: print(error.code)
    for entry in tasks(): print(entry["name"], entry["status"], entry["depends"], entry["note"])
    for wrong in (lambda: task("x", depends="build"), lambda: task(""), lambda: task("x")(iter_ ), lambda: task().__enter__(), task.skip):
        try: wrong()
        except (TypeError, ValueError, SnapshotdError): pass
        else: raise SystemExit("accepted")
""".replace("    task.plan(", "    def iter_(): yield 1\n    task.plan(", 1)

MODELS = """
    import asyncio, json
    from snapshotd.agent import model, record_usage, tool
    ran = []
    class Usage:
        def __init__(self, **fields): self.__dict__.update(fields)
        def model_dump(self, mode="python"): return dict(self.__dict__)
    class Answer:                                   # what a provider's library returns
        def __init__(self, text, usage):
            self.text, self.usage = text, usage
            self.choices = [Usage(message=Usage(content=text))]
        def model_dump(self, mode="python"):
            return {"text": self.text, "choices": [{"message": {"content": self.text}}], "usage": self.usage.model_dump()}
    class Stream:
        def __init__(self, items): self.items = iter(items)
        def __iter__(self): return self
        def __next__(self): return next(self.items)
    class AsyncStream:
        def __init__(self, items): self.items = iter(items)
        def __aiter__(self): return self
        async def __anext__(self):
            for item in self.items: return item
            raise StopAsyncIteration
    class RateLimited(Exception): pass

    @model
    def openai(messages, temperature=0):
        ran.append("openai")
        return Answer("hello", Usage(prompt_tokens=10, completion_tokens=2, details="x", total_tokens=12))
    @model(name="claude")
    async def anthropic(prompt):
        ran.append("anthropic")
        record_usage(cost_usd=0.5)
        return {"content": [{"text": prompt}], "usage": {"input_tokens": 3, "output_tokens": 4, "service_tier": "standard"}}
    @model
    def chunks(n):
        ran.append("chunks")
        yield {"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}
        for i in range(n): yield {"delta": {"text": str(i)}}
        yield {"usage": {"output_tokens": 9}}
    @model
    def streamed():
        ran.append("streamed")
        return Stream([Answer("a", None), Answer("b", Usage(prompt_tokens=1))][:1] + [{"x": 1}])
    @model
    async def astreamed():
        ran.append("astreamed")
        return AsyncStream([1, 2])
    @model
    def limited():
        ran.append("limited")
        raise RateLimited("slow down")
    Answer.model_dump = lambda self, mode="python": {"text": self.text, "choices": [{"message": {"content": self.text}}],
                                                     "usage": self.usage and self.usage.model_dump()}
    @tool
    def inner(): return model("sub", {"q": 1}, call=lambda: {"a": 2})

    reply = openai([{"role": "user", "content": "x" * 100000}], temperature=1)
    print(reply.choices[0].message.content, reply.text, reply.usage.prompt_tokens)
    print(asyncio.run(anthropic("p"))["content"][0]["text"])
    direct = model("gpt", {"model": "gpt", "n": 1}, call=lambda: ran.append("direct") or {"ok": True, "usage": None})
    print(direct["ok"], sorted(direct))
    print([sorted(chunk) for chunk in chunks(2)])
    print([getattr(item, "text", item) for item in streamed()])
    async def main(): return [item async for item in await astreamed()]
    print(asyncio.run(main()))
    async def hidden():
        ran.append("hidden")
        return {"q": 1}
    async def alambda():
        reply = await model("a", 1, call=lambda: hidden())
        same = await model("b", 1, call=hidden)
        stream = await model("c", 1, call=lambda: astreams())
        return reply["q"], same["q"], [item async for item in stream]
    async def astreams(): return AsyncStream([3])
    print(asyncio.run(alambda()))
    try: limited()
    except RateLimited as error: print("limited", error)
    print(inner())
    for wrong in (lambda: model("name"), lambda: model(print, call=print)):
        try: wrong()
        except TypeError as error: pass
        else: raise SystemExit("accepted")
    print("ran", *ran)
"""


THREADS = """
    import threading
    from concurrent.futures import ThreadPoolExecutor
    from snapshotd.agent import message, tool
    barrier = threading.Barrier(8)
    @tool
    def work(n):
        barrier.wait(30)                    # all eight are inside at the same time
        message("tool", n)
        return n
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(80))) == list(range(80))
"""
