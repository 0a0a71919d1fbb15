"""Trajectories as documents: which turns there are, however they were recorded, and that every document is right."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.share import export_trajectories
from snapshotd.engine.transfer.trajectories.atif import problem
from snapshotd.engine.transfer.trajectories.documents import export_trajectory
from snapshotd.engine.transfer.trajectories.reading import function_tools, reply_text, spoken
from snapshotd.engine.transfer.trajectories.scratch import Scratch, encode
from snapshotd.engine.transfer.trajectories.turns import family
from snapshotd.errors import OutOfSpace, UsageError
from snapshotd.gateway.base import RecordedReply
from snapshotd.gateway.routes import read_recorded
from snapshotd.scores import ExperimentBranch
from snapshotd.types import (
    BlobID,
    CallStatus,
    EntryKind,
    Experiment,
    ExperimentID,
    JournalEntry,
    Message,
    Snapshot,
    ToolCall,
    Trajectory,
    TrajectoryID,
)
from tests.records import ended_entry, follow, fork, make_call, started

OUTPUTS: dict[str, bytes] = {}


class Rig:
    """A catalog that is filled as a sandbox fills it."""

    def __init__(self, folder: Path) -> None:
        self.catalog = SqliteCatalog(folder / "catalog.db")
        self.context: Any = SimpleNamespace(
            catalog=self.catalog, state_dir=folder, output=lambda blob: iter((OUTPUTS[blob],))
        )
        self.line, self.first = started(self.catalog, "agent")

    def step(
        self,
        parent: Snapshot,
        messages: Sequence[tuple[str, Any]] = (),
        entries: Sequence[JournalEntry] = (),
        call: ToolCall | None = None,
        **fields: Any,
    ) -> Snapshot:
        """A snapshot that binds these messages and entries."""
        taken = follow(parent, messages=len(messages), call=call or make_call("checkpoint"), **fields)
        said = [Message(role, content) for role, content in messages]
        self.catalog.snapshots.commit(taken, said, expected_head=parent.id, entries=entries)
        return taken

    def tool(self, parent: Snapshot, name: str, arguments: Any, output: bytes = b'"out"', **details: Any) -> Any:
        """A call and its entry."""
        blob = BlobID(f"{len(OUTPUTS):064x}")
        OUTPUTS[blob] = output
        call = make_call(
            name, arguments=arguments, status=CallStatus.DONE, output=blob, stdout=None, stderr=None, error=None
        )
        entry = ended_entry(
            parent,
            id=call.id,
            kind=EntryKind.TOOL,
            name=name,
            arguments=arguments,
            details=details,
            error=None,
            result=None,
        )
        return call, entry

    def model(self, parent: Snapshot, result: Any, *, arguments: Any = None, **details: Any) -> JournalEntry:
        return ended_entry(parent, name="gpt", arguments=arguments, result=result, details=details, error=None)

    def export(self, head: Snapshot, form: Literal["atif", "jsonl"], line: Trajectory | None = None) -> list[Any]:
        written: list[bytes] = []
        export_trajectory(self.context, read_recorded, line or self.line, head, form, None, written.append)
        lines = b"".join(written).splitlines()
        if form == "atif":
            assert [problem(one) for one in lines] == [None] * len(lines)
        return [json.loads(one) for one in lines]

    def steps(
        self, head: Snapshot, line: Trajectory | None = None
    ) -> list[tuple[str, str, list[tuple[str, str | None]]]]:
        """Source, message, and the calls with their results, of each step."""
        (document,) = self.export(head, "atif", line)
        return [
            (
                step["source"],
                step["message"],
                [
                    (
                        call["function_name"],
                        next(
                            (
                                result.get("content")
                                for result in step.get("observation", {"results": ()})["results"]
                                if result.get("source_call_id") == call["tool_call_id"]
                            ),
                            None,
                        ),
                    )
                    for call in step.get("tool_calls", ())
                ],
            )
            for step in document["steps"]
        ]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.catalog.close()


def test_messages_that_a_person_took_back_are_not_in_it(rig: Rig) -> None:
    asked = rig.step(rig.first, [("user", "go"), ("assistant", "wrong")])
    wrong = rig.step(asked, [("user", "no"), ("assistant", "worse")])
    edited = rig.step(wrong, [("assistant", "right")], after=asked, keep=1)
    assert rig.steps(wrong) == [("user", "go", []), ("agent", "wrong", []), ("user", "no", []), ("agent", "worse", [])]
    assert rig.steps(edited) == [("user", "go", []), ("agent", "right", [])]


def test_a_promotion_binds_many_turns_at_once(rig: Rig) -> None:
    one, two = (rig.tool(rig.first, "sh", {"n": n})[1] for n in (1, 2))
    wire = {"gateway": True, "lane": 0}
    api = {"api": "openai-chat"}
    asks = [
        {"id": f"c{n}", "type": "function", "function": {"name": "sh", "arguments": json.dumps({"n": n})}}
        for n in (1, 2)
    ]
    messages: list[tuple[str, Any]] = [("user", "go")]
    for number in (0, 1):
        messages.append(("assistant", {"content": f"try {number}", "tool_calls": [asks[number]]}))
        messages.append(("tool", {"tool_call_id": f"c{number + 1}", "content": f"told {number}"}))
    entries = []
    for number, tool in enumerate((one, two)):
        entries.append(rig.model(rig.first, {}, arguments=api, **wire, usage={"input_tokens": number}))
        entries.append(
            replace(tool, result={"kept": number}, details={"lane": 0, "call": f"c{number + 1}", "promoted": "x"})
        )
    head = rig.step(rig.first, messages, entries, make_call("promote"))
    assert rig.steps(head) == [
        ("user", "go", []),
        ("agent", "try 0", [("sh", "told 0")]),
        ("agent", "try 1", [("sh", "told 1")]),
    ]
    (document,) = rig.export(head, "atif")
    assert [step.get("metrics") for step in document["steps"]] == [None, {"prompt_tokens": 0}, {"prompt_tokens": 1}]


def test_the_items_of_one_reply_are_one_step(rig: Rig) -> None:
    """The Responses API says thoughts, words and calls one by one."""
    call, entry = rig.tool(rig.first, "sh", {"n": 1}, lane=0, call="c1")
    model = rig.model(rig.first, {}, arguments={"api": "openai-responses"}, gateway=True, lane=0)
    messages = [
        ("system", "Be short."),
        ("user", [{"type": "input_text", "text": "go"}]),
        ("assistant", {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}),
        ("assistant", [{"type": "output_text", "text": "I look."}]),
        ("assistant", {"type": "function_call", "call_id": "c1", "name": "sh", "arguments": '{"n": 1}'}),
        ("tool", {"type": "function_call_output", "call_id": "c1", "output": "seen"}),
    ]
    head = rig.step(rig.first, messages, [model, entry], call)
    assert rig.steps(head) == [("system", "Be short.", []), ("user", "go", []), ("agent", "I look.", [("sh", "seen")])]
    assert rig.export(head, "atif")[0]["steps"][2]["reasoning_content"] == "hm"
    assert rig.export(head, "jsonl")[0]["messages"][2]["reasoning_content"] == "hm"


def test_equal_calls_side_by_side_are_told_apart(rig: Rig) -> None:
    """They end in the other order, and each has its own snapshot."""
    said = {
        "content": None,
        "tool_calls": [{"id": f"c{n}", "function": {"name": "sh", "arguments": "{}"}} for n in (1, 2)],
    }
    model = rig.model(rig.first, {}, arguments={"api": "openai-chat"}, gateway=True, lane=0)
    second, first = rig.tool(rig.first, "sh", {}, lane=0, call="c2"), rig.tool(rig.first, "sh", {}, lane=0, call="c1")
    results = [("tool", {"tool_call_id": f"c{n}", "content": f"r{n}"}) for n in (1, 2)]
    at = rig.step(rig.first, [("user", "go"), ("assistant", said), *results], [model, second[1]], second[0])
    head = rig.step(at, [], [first[1]], first[0])
    (document,) = rig.export(head, "atif")
    calls = document["steps"][1]["tool_calls"]
    assert [(call["tool_call_id"], call["extra"]["snapshot"]) for call in calls] == [("c1", head.id), ("c2", at.id)]
    assert [one["content"] for one in document["steps"][1]["observation"]["results"]] == ["r1", "r2"]


def test_calls_without_a_model_and_from_outside(rig: Rig) -> None:
    call, entry = rig.tool(rig.first, "build", {"all": True}, b'{"ok": 1}')
    built = rig.step(rig.first, [], [entry], call)
    outside = make_call(
        "exec", arguments=["not", "an object"], status=CallStatus.FAILED, output=None, stderr=None, error="x"
    )
    OUTPUTS[str(outside.stdout)] = b"\xff out"
    head = rig.step(built, [], [], outside)
    assert rig.steps(head) == [("agent", "", [("build", '{"ok": 1}')]), ("agent", "", [("exec", "\ufffd out\nx")])]
    (document,) = rig.export(head, "atif")
    assert [step["llm_call_count"] for step in document["steps"]] == [0, 0]
    assert document["steps"][1]["tool_calls"][0]["arguments"] == {"input": ["not", "an object"]}
    assert document["steps"][1]["observation"]["results"][0]["extra"] == {"failed": True}


def test_a_tasks_end_is_no_call(rig: Rig) -> None:
    """Its entry stands before the model's, which is looked for first."""
    call, entry = rig.tool(rig.first, "task", {"name": "first"})
    task = replace(entry, kind=EntryKind.TASK)
    model = rig.model(rig.first, {"content": "yes"})
    head = rig.step(rig.first, [("user", "go"), ("assistant", "yes")], [task, model], call)
    assert rig.steps(head) == [("user", "go", []), ("agent", "yes", [])]


HOSTILE: list[tuple[str, Any]] = [
    ("user", "\x1b]0;x\x07 \u202e \ud800 \U0001f600"),
    ("assistant", {"content": {"a": "\udfff"}, "tool_calls": "none"}),
    ("assistant", {"tool_calls": [3, {"id": 4, "function": {"name": None, "arguments": "{broken"}}]}),
    ("tool", ["x", {"type": "text", "text": 7}, None]),
    ("tool", {"tool_call_id": ["no"], "content": {"deep": [[[]]]}}),
    ("nonsense", {"type": "tool_result"}),
    ("user", [{"type": "image", "source": {"data": "A" * 50}}, {"type": ["x"]}, 3]),
    ("assistant", [{"type": "tool_use"}, {"type": "thinking", "thinking": None}, {"type": "redacted_thinking"}]),
    ("system", None),
    ("assistant", 17),
]


def test_messages_of_any_shape(rig: Rig) -> None:
    usage = {"input_tokens": -3, "output_tokens": "many", "cost_usd": True, "cached_tokens": 1.0}
    model = rig.model(rig.first, {}, arguments=["odd"], gateway=True, usage=usage, stop_reason=None)
    head = rig.step(rig.first, HOSTILE, [model])
    for form in ("atif", "jsonl"):
        written: list[bytes] = []
        warnings = export_trajectory(rig.context, read_recorded, rig.line, head, form, None, written.append)  # type: ignore[arg-type]
        whole = b"".join(written)
        assert whole.isascii()
        assert b"\x1b" not in whole
        assert b"\\ud800 " not in whole
        assert b"\\ud83d\\ude00" in whole, "a whole pair stays"
        assert b"AAAA" not in whole
        assert len(warnings) == 1
        assert "2 parts" in warnings[0]
    assert problem(encode(rig.export(head, "atif")[0])) is None


def test_nothing_recorded_is_an_error_and_writes_nothing(rig: Rig) -> None:
    with pytest.raises(UsageError, match="nothing to export"):
        rig.export(rig.first, "atif")


def test_a_fork_shares_its_beginning(rig: Rig) -> None:
    asked = rig.step(rig.first, [("user", "go"), ("assistant", "yes")])
    child = fork(asked, rig.line, "child")
    other = fork(asked, rig.line, "other")
    rig.catalog.trajectories.add([(child, None), (other, None)])
    own = rig.step(asked, [("user", "and?"), ("assistant", "no")], trajectory=child.id)
    grandchild = fork(own, child)
    rig.catalog.trajectories.add([(grandchild, None)])
    (document,) = rig.export(own, "atif", child)
    assert [step.get("is_copied_context") for step in document["steps"]] == [True, True, None, None]
    assert (document["extra"]["parent"], document["extra"]["fork_point"]) == (rig.line.id, asked.id)
    (line,) = rig.export(own, "jsonl", child)
    assert (line["shared_messages"], line["id"]) == (2, child.id)
    (inherited,) = rig.export(asked, "atif", other)
    assert [step.get("is_copied_context") for step in inherited["steps"]] == [True, True]
    assert family(rig.catalog, rig.line.id) == [rig.line.id, child.id, other.id, grandchild.id]
    assert family(rig.catalog, TrajectoryID(child.id)) == [child.id, grandchild.id]


@pytest.mark.parametrize("parts", [1, 100])
def test_memory_does_not_grow_with_the_trajectory(rig: Rig, parts: int) -> None:
    """10 MB in one snapshot, or in a hundred."""
    rounds, at = 500, rig.first
    for part in range(parts):
        messages = [
            (role, f"{part} " + "x" * 10_000) for _ in range(max(1, rounds // parts)) for role in ("user", "assistant")
        ]
        at = rig.step(at, messages)
    size = 0

    def count(data: bytes) -> None:
        nonlocal size
        size += len(data)

    tracemalloc.start()
    try:
        export_trajectory(rig.context, read_recorded, rig.line, at, "atif", None, count)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 9_000_000
    assert peak < 4_000_000


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with Scratch(tmp_path) as scratch:
        scratch._file.close()
        scratch._file = open("/dev/full", "r+b")  # noqa: SIM115 - the scratch closes it
        with pytest.raises(OutOfSpace, match="the disk is full"):
            scratch.pieces().add("x" * 100_000)


STEP: dict[str, Any] = {"step_id": 1, "source": "agent", "message": "m"}
DOCUMENT: dict[str, Any] = {"schema_version": "ATIF-v1.7", "agent": {"name": "a", "version": "1"}, "steps": [STEP]}


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"schema_version": "ATIF-v9.9"}, "schema_version"),
        ({"steps": []}, "steps"),
        ({"stepz": []}, "stepz"),
        ({"agent": {"name": "a"}}, "agent.version"),
        ({"steps": [{**STEP, "step_id": 2}]}, "count from 1"),
        ({"steps": [{**STEP, "step_id": "1"}]}, "steps.0.step_id"),
        ({"steps": [{**STEP, "source": "user", "tool_calls": []}]}, "only a step of an agent has tool_calls"),
        ({"steps": [{**STEP, "timestamp": "yesterday"}]}, "steps.0.timestamp"),
        ({"steps": [{**STEP, "llm_call_count": 0, "metrics": {}}]}, "no metrics"),
        ({"steps": [{**STEP, "metrics": {"prompt_tokens": -1}}]}, "metrics.prompt_tokens"),
        ({"steps": [{**STEP, "observation": {"results": [{"source_call_id": "c"}]}}]}, "answers no call"),
        (
            {"steps": [{**STEP, "observation": {"results": [{"subagent_trajectory_ref": [{"session_id": "s"}]}]}}]},
            "trajectory_path",
        ),
        (
            {"steps": [{**STEP, "observation": {"results": [{"subagent_trajectory_ref": [{"trajectory_id": "s"}]}]}}]},
            "not embedded",
        ),
        ({"subagent_trajectories": [DOCUMENT]}, "of its own"),
        ({"subagent_trajectories": [{**DOCUMENT, "trajectory_id": "t"}] * 2}, "of its own"),
    ],
)
def test_a_wrong_document_is_told_by_its_place(change: dict[str, Any], place: str) -> None:
    assert problem(json.dumps(DOCUMENT)) is None
    found = problem(json.dumps({**DOCUMENT, **change}))
    assert found is not None
    assert place in found


def test_replies_and_tools_in_each_form() -> None:
    assert reply_text({"choices": [{"message": {"content": "a"}}]}) == "a"
    assert reply_text({"content": [{"type": "text", "text": "b"}]}) == "b"
    assert reply_text({"output": [{"type": "message", "content": [{"type": "output_text", "text": "c"}]}]}) == "c"
    assert reply_text("d") == "d"
    assert reply_text({"streamed": "sync"}) is None
    old = spoken(Message("assistant", {"content": None, "function_call": {"name": "f", "arguments": "[1]"}}))
    assert [(call.name, call.arguments) for call in old.calls] == [("f", [1])]
    wanted = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    forms: list[Any] = [
        wanted,
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}},
    ]
    assert function_tools(forms) == [wanted] * 3
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert function_tools([search, 3]) == [search]


def test_geminis_contents_are_read() -> None:
    model = spoken(
        Message(
            "assistant",
            [
                {"text": "hm", "thought": True},
                {"text": "I look."},
                {"functionCall": {"id": "a", "name": "f", "args": {"n": 1}}, "thoughtSignature": "s"},
            ],
        )
    )
    assert (model.text, model.reasoning) == ("I look.", "hm")
    assert [(call.id, call.name, call.arguments) for call in model.calls] == [("a", "f", {"n": 1})]
    answers = [{"output": "x"}, {"error": "no"}, {"rows": 1}]
    user = spoken(
        Message("user", [{"functionResponse": {"id": "a", "name": "f", "response": given}} for given in answers])
    )
    assert [(result.id, result.text, result.failed) for result in user.results] == [
        ("a", "x", False),
        ("a", "no", True),
        ("a", '{"rows": 1}', False),
    ]
    picture = spoken(Message("user", [{"text": "see"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]))
    assert (picture.texts, picture.left_out) == (["see", "[inlineData]"], ["inlineData"])
    declared = [{"name": name, "description": "d", "parametersJsonSchema": {"type": "object"}} for name in ("f", "g")]
    tools = function_tools([{"functionDeclarations": declared}])
    assert [tool["function"]["name"] for tool in tools] == ["f", "g"]
    assert tools[0]["function"]["parameters"] == {"type": "object"}


def test_the_calls_of_a_lane_of_gemini_have_the_ids_of_the_journal(rig: Rig) -> None:
    """The bytes of the reply have none: only where it stands in its conversation says them."""
    body = json.dumps(
        {"candidates": [{"content": {"role": "model", "parts": [{"functionCall": {"name": "sh", "args": {}}}]}}]}
    )
    reply = {"status": 200, "content_type": "application/json", "complete": True, "body": body}
    reply["calls"] = [{"id": "place-1-0", "name": "sh", "arguments": {}}]
    told = {"messages": [{"role": "user", "content": [{"text": "explore"}]}], "caller": "c0"}
    model = rig.model(rig.first, reply, arguments={"api": "gemini-contents"}, gateway=True, lane=1, **told)
    call, entry = rig.tool(rig.first, "sh", {}, lane=1, call="place-1-0")
    head = rig.step(rig.first, [("user", "go")], [model, entry], call)
    made: list[dict[str, Any]] = []
    json.loads(
        json.dumps(rig.export(head, "atif")), object_hook=lambda one: made.extend(one.get("tool_calls", ())) or one
    )
    assert [(call["tool_call_id"], call["extra"].get("snapshot")) for call in made] == [("place-1-0", head.id)]


def test_a_reply_is_read_again_in_its_own_api() -> None:
    stream = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
    (message,) = read_recorded("openai-chat", RecordedReply(200, "text/event-stream", stream))
    assert message == Message("assistant", "a")


def test_the_score_of_an_experiments_branch_is_in_it(rig: Rig) -> None:
    """The record of the branch that has this very trajectory; names may have dots."""
    asked = rig.step(rig.first, [("user", "go")])
    branch = fork(asked, rig.line, "repair.v1.warm.2")
    namesake = fork(asked, rig.line, "other.warm.1")
    rig.catalog.trajectories.add([(branch, None), (namesake, None)])
    record = Experiment(ExperimentID("e" * 32), "repair.v1", rig.first.id, 1, "", None)
    scored = ExperimentBranch("warm", 2, "scored", branch.id, score=0.5, passed=True, cost=1.0)
    rig.catalog.experiments.add(record, [scored])
    other = replace(record, id=ExperimentID("f" * 32), name="other")
    rig.catalog.experiments.add(other, [replace(scored, run=1, trajectory="0" * 32)])
    written: list[bytes] = []
    progress: list[str] = []
    export_trajectories(rig.context, read_recorded, rig.line.id, "jsonl", True, written.append, progress.append)
    lines = [json.loads(line) for line in b"".join(written).splitlines()]
    assert [line["name"] for line in lines] == ["agent", "repair.v1.warm.2", "other.warm.1"]
    wanted = {"experiment": "repair.v1", "label": "warm", "run": 2, "state": "scored", "score": 0.5, "passed": True}
    assert [line["score"] for line in lines] == [None, wanted, None]
    assert len(progress) == 2
