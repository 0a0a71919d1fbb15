"""A trajectory as a document of the Agent Trajectory Interchange Format, or as lines for a trainer.

docs/agents/training.md describes both. A document is gathered turn by turn in a temporary file, since the conversations of
sub-agents are recorded in between and stand behind it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import ValidationError

from snapshotd.engine.context import Context
from snapshotd.engine.transfer.trajectories import atif
from snapshotd.engine.transfer.trajectories.reading import function_tools
from snapshotd.engine.transfer.trajectories.scratch import EncodedPieces, Scratch, encode
from snapshotd.engine.transfer.trajectories.turns import Dialog, Replies, Turn, TurnCall, Walk
from snapshotd.errors import InternalError, NotFound, UsageError
from snapshotd.types import Snapshot, Trajectory, short

Write = Callable[[bytes], object]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CALLERS = 10_000
"""Calls that are remembered with their steps, for conversations that they lead to."""
_SUMS = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "cached_tokens": "cached_tokens"}
"""Names of token counts outside, and in the record."""


@dataclass(slots=True)
class Gathered:
    """One conversation as it is gathered. `turns`: steps, or messages; `facts`: what is known of the agent's turns;
    `referred`: by the number of a step, its calls and the conversations that they led to."""

    conversation: Dialog
    turns: EncodedPieces
    facts: EncodedPieces
    sums: dict[str, float] = field(default_factory=dict)
    copied: int = 0
    model: str | None = None
    referred: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def count(self, turn: Turn) -> None:
        if turn.model is None:
            return
        self.model = self.model or turn.model.name
        for name in (*_SUMS.values(), "cost_usd"):
            amount = _amount(turn.model.usage.get(name))
            if amount is not None:
                self.sums[name] = self.sums.get(name, 0) + (amount if name == "cost_usd" else int(amount))


class Documents(ABC):
    """Gathers the conversations of one trajectory, and writes them."""

    def __init__(self, context: Context, line: Trajectory, head: Snapshot, scratch: Scratch) -> None:
        self.context, self.line, self.head, self._scratch = context, line, head, scratch
        self.gathered: dict[int | None, Gathered] = {}
        self._callers: dict[str, tuple[int | None, int]] = {}
        """The place of each call: its conversation, and the number of its step there."""

    def take(self, conversation: Dialog, turn: Turn) -> None:
        """The next turn of a conversation."""
        mine = self.gathered.get(conversation.lane)
        if mine is None:
            mine = Gathered(conversation, self._scratch.pieces(), self._scratch.pieces())
            self.gathered[conversation.lane] = mine
        mine.count(turn)
        number = self.add(mine, turn)
        for call in turn.calls:
            self._callers[call.id] = conversation.lane, number
        while len(self._callers) > _CALLERS:
            del self._callers[next(iter(self._callers))]

    def end(self) -> None:
        """Find the calls that led to conversations, when all turns are there."""
        for lane, mine in self.gathered.items():
            caller = mine.conversation.caller
            if lane is not None and caller in self._callers:
                parent, number = self._callers[caller]
                self.gathered[parent].referred.setdefault(number, []).append((caller, lane))

    @abstractmethod
    def add(self, mine: Gathered, turn: Turn) -> int:
        """Encode a turn; returns its number."""

    @abstractmethod
    def write(self, write: Write, facts: Mapping[str, Any]) -> None:
        """Write it. `facts`: of the trajectory as a whole."""

    def name_of(self, lane: int | None) -> str:
        """The id of a conversation's document."""
        return str(self.line.id) if lane is None else f"{self.line.id}.{lane}"

    def agent_name(self) -> str:
        spec = self.line.agent
        words = () if spec is None else spec.argv[: spec.program]
        names = [name for word in words if (name := PurePosixPath(word).name) and not name.startswith("python")]
        return names[-1] if names else "unknown"


class AtifDocuments(Documents):
    """One document of the interchange format, with the other conversations in it."""

    def add(self, mine: Gathered, turn: Turn) -> int:
        number = len(mine.turns) + 1
        try:
            mine.turns.add(_step(number, turn).model_dump(exclude_none=True))
        except ValidationError as exc:
            raise InternalError(
                f"step {number} of {self.name_of(mine.conversation.lane)} does not fit {atif.VERSION}: {atif.first_of(exc)}"
            ) from exc
        return number

    def write(self, write: Write, facts: Mapping[str, Any]) -> None:
        written: set[int | None] = set()
        below: dict[int | None, list[int]] = {}
        for lane, mine in self.gathered.items():
            for calls in mine.referred.values():
                below.setdefault(lane, []).extend(child for _, child in calls)
        called = {child for children in below.values() for child in children}
        loose = [lane for lane in self.gathered if lane is not None and lane not in called]
        below[None] = [*below.get(None, []), *loose]
        self._write_one(write, None, below, written, facts)
        write(b"\n")

    def _write_one(
        self,
        write: Write,
        lane: int | None,
        below: Mapping[int | None, list[int]],
        written: set[int | None],
        facts: Mapping[str, Any],
    ) -> None:
        mine = self.gathered[lane]
        written.add(lane)
        head = encode(self._head(mine, facts).model_dump(exclude_none=True))
        write(head[:-1] + b',"steps":[')
        for number, step in enumerate(mine.turns, 1):
            write((b"," if number > 1 else b"") + self._referring(step, mine.referred.get(number, ())))
        write(b"]")
        for number, child in enumerate(one for one in below.get(lane, ()) if one not in written):
            write(b',"subagent_trajectories":[' if number == 0 else b",")
            self._write_one(write, child, below, written, {})
        write(b"]}" if below.get(lane) else b"}")

    def _referring(self, step: bytes, calls: Iterable[tuple[str, int]]) -> bytes:
        """A step whose results name the trajectories of the sub-agents that its calls led to."""
        if not calls:
            return step
        value = json.loads(step)
        results = value.setdefault("observation", {"results": []})["results"]
        for call_id, lane in calls:
            ref = {"trajectory_id": self.name_of(lane), "session_id": self.line.id}
            found = next((one for one in results if one.get("source_call_id") == call_id), None)
            if found is None:
                found = {"source_call_id": call_id}
                results.append(found)
            found.setdefault("subagent_trajectory_ref", []).append(ref)
        return encode(value)

    def _head(self, mine: Gathered, facts: Mapping[str, Any]) -> atif.Head:
        conversation = mine.conversation
        tools = function_tools(conversation.params.get("tools"))
        extra = dict(facts)
        if conversation.lane is not None:
            extra |= {"lane": conversation.lane, "caller": conversation.caller}
        if conversation.left_out:
            extra["left_out_parts"] = conversation.left_out
        sums: dict[str, Any] = {f"total_{name}": int(mine.sums[own]) for name, own in _SUMS.items() if own in mine.sums}
        return atif.Head(
            session_id=self.line.id,
            trajectory_id=self.name_of(conversation.lane),
            agent=atif.AtifAgent(
                name=self.agent_name(), version="unknown", model_name=mine.model, tool_definitions=tools or None
            ),
            final_metrics=atif.FinalMetrics(
                **sums, total_cost_usd=self._cost(conversation.lane), total_steps=len(mine.turns)
            ),
            extra={name: value for name, value in extra.items() if value is not None} or None,
        )

    def _cost(self, lane: int | None) -> float | None:
        """The cost of a conversation; that of the trajectory's own has those of all others in it."""
        parts = self.gathered.values() if lane is None else [self.gathered[lane]]
        found = [float(one.sums["cost_usd"]) for one in parts if "cost_usd" in one.sums]
        return sum(found) if found else None


class LineDocuments(Documents):
    """One line for each conversation, with messages in the form of OpenAI's chat."""

    def add(self, mine: Gathered, turn: Turn) -> int:
        number = len(mine.turns)
        for message in _messages(turn):
            mine.turns.add(message)
        if turn.copied:
            mine.copied = len(mine.turns)
        if turn.source == "agent":
            mine.facts.add(_turn_facts(number, turn))
        return number

    def write(self, write: Write, facts: Mapping[str, Any]) -> None:
        for lane, mine in self.gathered.items():
            conversation = mine.conversation
            params = {name: value for name, value in conversation.params.items() if name != "tools"}
            head = {
                "id": self.name_of(lane),
                **facts,
                "lane": lane,
                "caller": conversation.caller,
                "model": mine.model,
                "tools": function_tools(conversation.params.get("tools")) or None,
                "parameters": params or None,
                "usage": mine.sums or None,
                "shared_messages": mine.copied,
            }
            write(encode(head)[:-1])
            for name, pieces in (("messages", mine.turns), ("turns", mine.facts)):
                write(b',"%s":[' % name.encode())
                for number, piece in enumerate(pieces):
                    write((b"," if number else b"") + piece)
                write(b"]")
            write(b"}\n")


def _step(number: int, turn: Turn) -> atif.AtifStep:
    agent = turn.source == "agent"
    results = [_result(call) for call in turn.calls if call.result is not None]
    results += [atif.ObservationResult(content=text) for text in turn.loose]
    return atif.AtifStep(
        step_id=number,
        timestamp=None if turn.at_ns is None else _iso(turn.at_ns),
        source=turn.source,
        model_name=None if turn.model is None else turn.model.name,
        message=turn.text,
        reasoning_content=turn.reasoning if turn.model is not None or turn.text else None,
        tool_calls=[_atif_call(call) for call in turn.calls] or None,
        observation=atif.Observation(results=results) if results else None,
        metrics=_metrics(turn),
        is_copied_context=True if turn.copied else None,
        llm_call_count=None if not agent or (turn.text and turn.model is None) else int(turn.model is not None),
        extra={"snapshot": turn.snapshot},
    )


def _atif_call(call: TurnCall) -> atif.AtifCall:
    given = call.arguments
    extra = {"snapshot": call.snapshot, "status": None if call.status is None else call.status.value}
    return atif.AtifCall(
        tool_call_id=call.id,
        function_name=call.name,
        arguments=given if isinstance(given, dict) else {} if given is None else {"input": given},
        extra={name: value for name, value in extra.items() if value is not None} or None,
    )


def _result(call: TurnCall) -> atif.ObservationResult:
    return atif.ObservationResult(
        source_call_id=call.id, content=call.result, extra={"failed": True} if call.failed else None
    )


def _metrics(turn: Turn) -> atif.Metrics | None:
    if turn.model is None:
        return None
    usage, tokens = turn.model.usage, turn.model.tokens or {}
    counts: dict[str, Any] = {name: _count(usage.get(own)) for name, own in _SUMS.items()}
    cost = _amount(usage.get("cost_usd"))
    ids = {name: tokens.get(name) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")}
    if all(value is None for value in (*counts.values(), cost, *ids.values())):
        return None
    return atif.Metrics(**counts, cost_usd=cost, **ids)


def _amount(value: Any) -> float | None:
    """A number that a provider or a program has counted; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def _count(value: Any) -> int | None:
    amount = _amount(value)
    return None if amount is None else int(amount)


def _messages(turn: Turn) -> Iterable[dict[str, Any]]:
    """A turn as messages of OpenAI's chat."""
    if turn.source != "agent":
        yield {"role": turn.source, "content": turn.text}
        return
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {}),
            },
        }
        for call in turn.calls
    ]
    said: dict[str, Any] = {"role": "assistant", "content": turn.text if turn.text or not calls else None}
    if turn.reasoning is not None:
        said["reasoning_content"] = turn.reasoning
    yield {**said, "tool_calls": calls} if calls else said
    for call in turn.calls:
        if call.result is not None:
            yield {"role": "tool", "tool_call_id": call.id, "content": call.result}
    for text in turn.loose:
        yield {"role": "tool", "content": text}


def _turn_facts(number: int, turn: Turn) -> dict[str, Any]:
    """The facts of a turn that are no words. `message`: the number of its message."""
    found: dict[str, Any] = {"message": number, "snapshot": turn.snapshot}
    if turn.at_ns is not None:
        found["at"] = _iso(turn.at_ns)
    if turn.model is not None:
        found |= {"model": turn.model.name, "usage": turn.model.usage, "stop_reason": turn.model.stop_reason}
        found |= turn.model.tokens or {}
    found["calls"] = [
        {"id": call.id, "status": call.status and call.status.value, "snapshot": call.snapshot} for call in turn.calls
    ]
    return {name: value for name, value in found.items() if value is not None}


def _iso(time_ns: int) -> str:
    moment = _EPOCH + timedelta(microseconds=min(time_ns // 1000, 253_402_300_799_000_000))
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"


# -- the whole ---------------------------------------------------------------------------------------------------------


def export_trajectory(
    context: Context,
    replies: Replies,
    line: Trajectory,
    head: Snapshot,
    form: Literal["atif", "jsonl"],
    score: Mapping[str, Any] | None,
    write: Write,
) -> tuple[str, ...]:
    """Write what is recorded of a trajectory up to `head`. Returns warnings. UsageError: there is nothing. OutOfSpace,
    DataLoss."""
    with Scratch(context.state_dir) as scratch:
        documents = (AtifDocuments if form == "atif" else LineDocuments)(context, line, head, scratch)
        walk = Walk(context, replies, line.id, head, documents.take)
        walk.run()
        documents.end()
        if None not in documents.gathered:
            raise UsageError(
                f"{short(line.id)} has no conversation and no call up to snapshot {short(head.id)}, so there is nothing to export"
            )
        documents.write(write, _facts(context, line, head, score, walk))
    left_out = sum(one.left_out for one in (walk.main, *walk.lanes.values()))
    warnings = []
    if left_out:
        warnings.append(f"{short(line.id)}: {left_out} parts of messages are no text, and only their kind is there")
    if walk.unread:
        warnings.append(f"{short(line.id)}: {walk.unread} replies were too long to be kept, and are missing")
    return tuple(warnings)


def _facts(
    context: Context, line: Trajectory, head: Snapshot, score: Mapping[str, Any] | None, walk: Walk
) -> dict[str, Any]:
    parent = None
    if line.forked_from is not None:
        try:
            parent = context.catalog.snapshots.get(line.forked_from).trajectory
        except NotFound:
            pass  # it is not on this machine
    return {
        "trajectory": line.id,
        "name": line.name,
        "head": head.id,
        "parent": parent,
        "fork_point": line.forked_from,
        "score": None if score is None else dict(score),
        "outcome": {"status": line.status.value, "exit_code": line.exit_code},
        "failed_model_calls": walk.failed_model_calls or None,
    }
