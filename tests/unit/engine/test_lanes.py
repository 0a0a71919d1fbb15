"""The lane that a request on the wire belongs to, by what it contains and continues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snapshotd.engine.journal.replay import Elsewhere, Mismatch, Replay
from snapshotd.engine.journal.wire.lanes import Lane, LanePlace, Lanes, words_key
from snapshotd.gateway.anthropic import AnthropicMessages
from snapshotd.gateway.base import TurnRequest
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.openai_responses import OpenAIResponses
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, SnapshotID

MEMO = DigestMemo()


def request(*messages: tuple[str, Any], system: str = "You help.") -> TurnRequest:
    body = {"model": "m", "system": system, "messages": [{"role": role, "content": text} for role, text in messages]}
    return AnthropicMessages().read_request(body, 0, MEMO)


def use(call_id: str, **arguments: Any) -> tuple[str, Any]:
    return "assistant", [{"type": "tool_use", "id": call_id, "name": "t", "input": arguments}]


def result(call_id: str) -> tuple[str, Any]:
    return "user", [{"type": "tool_result", "tool_use_id": call_id, "content": "ok"}]


class Talk:
    """Lanes as the gateway uses them."""

    def __init__(self) -> None:
        self.lanes = Lanes()
        self.open: dict[str, Any] = {}

    def ask(self, *messages: tuple[str, Any], reply: tuple[str, Any] | None = None, **more: Any) -> tuple[Lane, int]:
        asked = request(*messages, **more)
        place = self.lanes.place(asked, self.open)
        lane, known = place.lane, place.known
        lane.digests[known:] = asked.digests[known:]
        if reply is not None:
            lane.digests += request(reply, system="").digests
            for block in reply[1] if isinstance(reply[1], list) else ():
                self.lanes.add_calls(lane, {block["id"]: block["input"]})
                self.open[block["id"]] = block["input"]
        return lane, known


def test_sub_agents_that_share_a_system_prompt() -> None:
    talk = Talk()
    main, _ = talk.ask(("user", "go"), reply=use("a", prompt="explore the left side"))
    talk.open["b"] = {"prompt": "explore the right side"}
    left, known = talk.ask(("user", "Today.\nexplore the left side"), system="sub", reply=use("l1"))
    right, _ = talk.ask(("user", "Today.\nexplore the right side"), system="sub", reply=use("r1"))
    assert [main.caller, left.caller, right.caller] == [None, "a", "b"]
    assert len({main.number, left.number, right.number}) == 3
    assert known == 0
    again = talk.ask(("user", "Today.\nexplore the left side"), use("l1"), result("l1"), system="sub")
    assert again == (left, 3), "the system prompt, the task and the call are known"


def test_two_with_the_same_words_are_two() -> None:
    talk = Talk()
    talk.open = {"a": {"prompt": "do the same"}, "b": {"prompt": "do the same"}}
    one, _ = talk.ask(("user", "do the same"))
    one.asking = 1
    two, _ = talk.ask(("user", "do the same"))
    assert one is not two
    assert {one.caller, two.caller} == {"a", "b"}


def test_a_sub_agent_in_the_background() -> None:
    """Codex ends the call at once, and the sub-agent works on."""
    talk = Talk()
    talk.ask(("user", "go"), reply=use("a", message="explore the left side"))
    del talk.open["a"]
    other, _ = talk.ask(("user", "please explore the left side again"))
    lane, _ = talk.ask(("user", "explore the left side"), system="sub")
    assert (other.caller, lane.caller) == (None, "a")


def test_a_request_that_is_repeated_is_the_same_one() -> None:
    talk = Talk()
    lane, _ = talk.ask(("user", "go"))
    assert talk.ask(("user", "go")) == (lane, 2)


def test_arguments_in_another_spelling() -> None:
    talk = Talk()
    lane, _ = talk.ask(("user", "go"), reply=use("a", path="f"))
    spelt = use("a", path="f", replace_all=False)
    assert talk.ask(("user", "go"), spelt, result("a"), reply=use("b")) == (lane, 3)
    assert talk.ask(("user", "go"), spelt, result("a"), use("b"), result("b")) == (lane, 5)


def test_a_shortened_conversation_is_known_by_its_calls() -> None:
    talk = Talk()
    lane, _ = talk.ask(("user", "go"), reply=use("a"))
    assert talk.ask(("user", "in short: go"), use("a"), result("a"), system="other") == (lane, 3)


def test_a_question_on_the_side_is_not_the_conversation_that_it_is_about() -> None:
    """Gemini CLI asks which model a task needs, and tells it the calls so far."""
    talk = Talk()
    said = [("user", "go"), use("a"), result("a")]
    main, _ = talk.ask(said[0], reply=said[1])
    router = "You are a specialized Task Routing AI."
    side, known = talk.ask(*said, ("user", "more"), system=router)
    side.side = True
    assert (side is main, known) == (False, 0)
    assert talk.ask(*said, reply=("assistant", "done"))[0] is main
    assert talk.ask(*said, ("user", "more"), ("assistant", "x"), ("user", "and"), system=router)[0] is side


def test_a_conversation_taken_back() -> None:
    talk = Talk()
    lane, _ = talk.ask(("user", "go"), reply=("assistant", "gone"))
    talk.ask(("user", "go"), ("assistant", "gone"), ("user", "and back"), reply=("assistant", "back"))
    assert talk.ask(("user", "go"), ("assistant", "gone"), ("user", "and on")) == (lane, 3)


def test_words_lead_to_the_lane_of_a_client_that_arranges_its_messages_anew() -> None:
    """Aider shows its files behind what was said before, and says "Ok." in the model's name."""
    lanes = Lanes()
    ok = ("assistant", "Ok.")

    def ask(*messages: tuple[str, Any], said: str | None = None, **more: Any) -> LanePlace:
        asked = request(*messages, **more)
        place = lanes.place(asked, {})
        place.lane.digests[place.at :] = asked.digests[place.known :]
        if said is not None:
            reply = request(("assistant", said), system="")
            place.lane.digests += reply.digests
            lanes.remember(place.lane, len(place.lane.digests), words_key(reply, reply.items[0]), None)
        return place

    one = ask(("user", "no files"), ok, ("user", "greet"), said="I greet.\n")
    greeted = [("user", "greet"), ("assistant", "I greet."), ("user", "done"), ok]
    second = [*greeted, ("user", "a: hello"), ok, ("user", "more")]
    place = ask(*second, said="I mend.")
    assert (place.lane, place.known, place.at) == (one.lane, 3, 5)
    assert place.end(request(*second)) == 10
    again = ask(*second)
    assert (again.lane, again.known, again.at) == (one.lane, 8, 10), "it is sent once more"
    back = ask(*greeted, ("user", "a: hello"), ok, ("user", "instead"), said="Ok.")
    assert (back.lane, back.known, back.at) == (one.lane, 7, 9), "and after one that was taken back"
    third = [*greeted, ("user", "instead"), ok, ("user", "a: bye"), ok, ("user", "on")]
    place = ask(*third)
    assert (place.lane, place.at, place.known) == (one.lane, 11, 9), "the newest of its words count"
    assert ask(*third, system="You judge.").lane is not one.lane
    messages = [{"role": role, "content": text} for role, text in third]
    body = {"model": "m", "system": "You help.", "tools": [{"name": "t"}], "messages": messages}
    tools = AnthropicMessages().read_request(body, 0, MEMO)
    assert lanes.place(tools, {}).lane is not one.lane


# -- replay ------------------------------------------------------------------------------------------------------------


def entry(name: str, began: int, lane: int | None, kind: EntryKind = EntryKind.MODEL, **details: Any) -> JournalEntry:
    own = {} if lane is None else {"lane": lane}
    return JournalEntry(
        CallID(f"{name}-{began}"),
        kind,
        "m",
        {"digest": name},
        SnapshotID("s"),
        began,
        ended_at_ns=began + 1,
        status=CallStatus.DONE,
        details={**own, **details},
    )


def meet(replay: Replay, name: str, lane: int | None, *, called: bool = False) -> str | None:
    found = replay.match_on_wire(EntryKind.MODEL, "m", {"digest": name, "prompt": "x"}, lane, called=called)
    return None if found is None else found.id


def test_each_lane_is_matched_for_itself() -> None:
    replay = Replay([entry("m1", 0, 0), entry("a1", 2, 1), entry("b1", 4, 2), entry("a2", 6, 1), entry("b2", 8, 2)])
    assert meet(replay, "m1", None) == "m1-0"
    assert [meet(replay, "b1", None), meet(replay, "b2", 2)] == ["b1-4", "b2-8"]
    with pytest.raises(Elsewhere):
        meet(replay, "b3", 2)
    with pytest.raises(Elsewhere):
        meet(replay, "c1", None, called=True)
    assert [meet(replay, "a1", None), meet(replay, "a2", 1)] == ["a1-2", "a2-6"]
    assert replay.exhausted
    assert meet(replay, "b3", 2) is None


def test_other_words_in_a_lane_and_at_the_start() -> None:
    replay = Replay([entry("m1", 0, 0), entry("m2", 2, 0)])
    with pytest.raises(Mismatch):
        meet(replay, "other", None)
    meet(replay, "m1", None)
    with pytest.raises(Mismatch) as caught:
        meet(replay, "other", 0)
    assert caught.value.recorded.id == "m2-2"


def test_nobody_waits_for_a_question_on_the_side() -> None:
    replay = Replay([entry("title", 0, 0, side=True), entry("m1", 2, 1)])
    assert meet(replay, "m1", None) == "m1-2"
    assert replay.exhausted
    assert meet(replay, "m2", 1) is None


def test_a_question_on_the_side_is_known_by_what_it_asks() -> None:
    """It is about other words than it was: those of a test that ran again, for one."""
    replay = Replay(
        [
            replace(entry(name, 2 * lane, lane, side=lane > 0), arguments={"digest": name, **more})
            for lane, (name, more) in enumerate(
                [("m1", {}), ("about 1", {"question": "commit?"}), ("title", {"question": "title?"})]
            )
        ]
        + [entry("m2", 8, 0)]
    )

    def ask(**outline: Any) -> str | None:
        found = replay.match_on_wire(EntryKind.MODEL, "m", outline, None)
        return None if found is None else found.id

    assert meet(replay, "m1", None) == "m1-0"
    assert ask(digest="about 2", question="commit?") == "about 1-2"
    with pytest.raises(Elsewhere):
        ask(digest="about 3", question="commit?")
    assert ask(digest="title", question="title of that?") == "title-4", (
        "a journal without questions, or of another prompt"
    )
    assert meet(replay, "m2", 0) == "m2-8"


def test_a_reply_waits_unless_something_follows_from_its_calls() -> None:
    replay = Replay([entry("m1", 0, 0), entry("a1", 2, 1, caller="x")])
    meet(replay, "m1", None)
    assert replay.needs(0, ["x"])
    assert not replay.needs(0, ["y"])


def test_an_older_journal_has_one_order() -> None:
    replay = Replay([entry("m1", 0, None), entry("m2", 2, None)])
    with pytest.raises(Mismatch):
        meet(replay, "m2", None)
    assert [meet(replay, "m1", None), meet(replay, "m2", 0)] == ["m1-0", "m2-2"]


# -- conversations that the provider remembers -------------------------------------------------------------------------


def continuing(*items: dict[str, Any], **more: Any) -> TurnRequest:
    body = {"model": "m", "instructions": "You help.", "input": list(items), **more}
    return OpenAIResponses().read_request(body, 0, MEMO)


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "ok"}


def follow(lanes: Lanes, asked: TurnRequest, reply_id: str, *calls: str) -> LanePlace:
    place = lanes.place(asked, {})
    said = [{"type": "function_call", "call_id": call_id, "name": "t", "arguments": "{}"} for call_id in calls]
    place.lane.digests[place.at :] = [*asked.digests[place.known :], *continuing(*said, instructions="").digests]
    lanes.add_calls(place.lane, {call: {} for call in calls})
    lanes.add_reply(place.lane, asked, reply_id)
    return place


GO = {"role": "user", "content": "go"}


def test_a_response_leads_to_its_lane() -> None:
    lanes = Lanes()
    one = follow(lanes, continuing(GO), "resp_a", "a")
    other = follow(lanes, continuing({"role": "user", "content": "elsewhere"}), "resp_b", "b")
    place = follow(lanes, continuing(output("a"), previous_response_id="resp_a"), "resp_c", "c")
    assert (place.lane, place.known, place.at, place.opening) == (one.lane, 1, 3, 1), "the instructions are known"
    again = lanes.place(continuing(output("a"), previous_response_id="resp_a"), {})
    assert (again.known, again.at) == (2, 4), "the same request once more"
    back = lanes.place(continuing({"role": "user", "content": "instead"}, previous_response_id="resp_a"), {})
    assert (back.lane, back.known, back.at) == (one.lane, 1, 3)
    assert lanes.place(continuing(output("b"), previous_response_id="resp_b"), {}).lane is other.lane


def test_a_conversation_that_the_provider_keeps_leads_to_its_lane() -> None:
    lanes = Lanes()
    one = follow(lanes, continuing(GO, conversation="conv_1"), "resp_a", "a")
    follow(lanes, continuing(GO, conversation={"id": "conv_2"}), "resp_b", "b")
    for number, call in enumerate("ac"):
        asked = continuing(output(call), conversation="conv_1")
        place = follow(lanes, asked, f"resp_c{number}", "c")
        assert (place.lane, place.known, place.at) == (one.lane, 1, 3 + 2 * number)


def test_a_response_that_is_not_known_is_by_the_calls_that_it_answers() -> None:
    lanes = Lanes()
    one = follow(lanes, continuing(GO), "resp_a", "a")
    assert lanes.place(continuing(output("a"), previous_response_id="resp_other"), {}).lane is one.lane
    assert lanes.place(continuing(output("x"), previous_response_id="resp_other"), {}).lane is not one.lane
