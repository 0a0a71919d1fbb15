"""Model calls: request, reply, usage and streams, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import MODELS

from tests.agent_daemon import FakeDaemon

Run = Callable[..., Any]


def test_models_are_recorded_and_replayed(run_agent: Run, socket_path: Path) -> None:
    first = FakeDaemon()
    with first.serving(socket_path):
        before = run_agent(MODELS).stdout.splitlines()
    assert before[:-1] == [
        "hello hello 10",
        "p",
        "True ['ok', 'usage']",
        "[['message', 'type'], ['delta'], ['delta'], ['usage']]",
        "['a', {'x': 1}]",
        "[1, 2]",
        "(1, 1, [3])",
        "limited slow down",
        "{'a': 2}",
    ]
    assert before[-1] == "ran openai anthropic direct chunks streamed astreamed hidden hidden limited"
    calls = list(first.calls.values())
    assert [(call["kind"], call["name"]) for call in calls] == [
        *[
            ("model", name)
            for name in ("openai", "claude", "gpt", "chunks", "streamed", "astreamed", "a", "b", "c", "limited")
        ],
        ("tool", "inner"),
    ]
    assert calls[0]["arguments"] == {"messages": [{"role": "user", "content": "x" * 100_000}], "temperature": 1}
    assert calls[0]["usage"] == {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}
    assert calls[1]["usage"] == {"input_tokens": 3, "output_tokens": 4, "cost_usd": 0.5}
    assert calls[2]["arguments"] == {"request": {"model": "gpt", "n": 1}}
    assert calls[2]["usage"] is None
    assert calls[3]["usage"] == {"input_tokens": 7, "output_tokens": 9}
    assert calls[3]["result"]["items"][1] == {"delta": {"text": "0"}}
    assert calls[4]["result"]["items"][0]["text"] == "a"
    assert not any(
        "parked" in request for request in first.sent("call_end") if first.calls[request["call"]]["kind"] == "model"
    )
    second = first.resumed()
    with second.serving(socket_path):
        after = run_agent(MODELS).stdout.splitlines()
    assert after == [*before[:-1], "ran"]
    assert second.old_journal == []


def test_outside_of_a_sandbox_models_run(run_agent: Run, tmp_path: Path) -> None:
    assert (
        run_agent(MODELS, SNAPSHOTD_AGENT_SOCKET=str(tmp_path / "none"))
        .stdout.splitlines()[-1]
        .startswith("ran openai anthropic")
    )


def test_a_request_over_the_limit_is_cut_and_said_so(daemon: FakeDaemon, server: FakeDaemon, run_agent: Run) -> None:
    run_agent("""
        from snapshotd.agent import model
        assert model("big", ["y" * 10000000], call=lambda: 1) == 1
    """)
    ((_, call),) = daemon.calls.items()
    assert "sha256" in call["arguments"]["request"]
    assert len(call["arguments"]["request"]) <= 8 << 20
