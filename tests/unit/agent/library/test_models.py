"""Model calls: request, reply, usage and streams, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.agent_daemon import FakeDaemon

Run = Callable[..., Any]

PROGRAM = """
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


def test_models_are_recorded_and_replayed(run_agent: Run, socket_path: Path) -> None:
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(PROGRAM).stdout.splitlines()
    assert before[:-1] == ["hello hello 10", "p", "True ['ok', 'usage']", "[['message', 'type'], ['delta'], ['delta'], ['usage']]",
                           "['a', {'x': 1}]", "[1, 2]", "(1, 1, [3])", "limited slow down", "{'a': 2}"]  # fmt: skip
    assert before[-1] == "ran openai anthropic direct chunks streamed astreamed hidden hidden limited"
    calls = list(first.calls.values())
    assert [(call["kind"], call["name"]) for call in calls] == [
        *[("model", name) for name in ("openai", "claude", "gpt", "chunks", "streamed", "astreamed", "a", "b", "c", "limited")],
        ("tool", "inner"),
    ]  # fmt: skip
    assert calls[0]["arguments"] == {"messages": [{"role": "user", "content": "x" * 100_000}], "temperature": 1}
    assert calls[0]["usage"] == {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}
    assert calls[1]["usage"] == {"input_tokens": 3, "output_tokens": 4, "cost_usd": 0.5}
    assert calls[2]["arguments"] == {"request": {"model": "gpt", "n": 1}}
    assert calls[2]["usage"] is None
    assert calls[3]["usage"] == {"input_tokens": 7, "output_tokens": 9}
    assert calls[3]["result"]["items"][1] == {"delta": {"text": "0"}}
    assert calls[4]["result"]["items"][0]["text"] == "a"
    assert not any("parked" in request for request in first.sent("call_end") if first.calls[request["call"]]["kind"] == "model")
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(PROGRAM).stdout.splitlines()
    assert after == [*before[:-1], "ran"]
    assert second.old_journal == []


def test_outside_of_a_sandbox_models_run(run_agent: Run, tmp_path: Path) -> None:
    assert run_agent(PROGRAM, SNAPSHOTD_AGENT_SOCKET=str(tmp_path / "none")).stdout.splitlines()[-1].startswith("ran openai anthropic")


def test_a_request_over_the_limit_is_cut_and_said_so(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import model
        assert model("big", ["y" * 10000000], call=lambda: 1) == 1
    """)
    ((_, call),) = daemon.calls.items()
    assert "sha256" in call["arguments"]["request"]
    assert len(call["arguments"]["request"]) <= 8 << 20
