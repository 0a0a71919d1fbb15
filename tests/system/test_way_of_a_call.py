"""The way of one tool call through the daemon, from the agent's socket to the commit: few places, and none calls back
up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import snapshotd
from snapshotd.api.commands import CommandFields
from snapshotd.api.trajectories import CreateRequest
from snapshotd.engine.journal.approval.records import Asked
from snapshotd.engine.journal.pending import Open
from snapshotd.engine.protocol.agent_handler import Intent, Outcome
from snapshotd.engine.protocol.agent_request import AgentRequest
from snapshotd.types import NO_ISOLATION, Ended, JournalEntry, ToolCall
from tests import mind_rig

MOST_PLACES = 15
AGENT = """
from snapshotd.agent import tool

@tool
def note(text):
    with open("note", "w") as file:
        file.write(text)
    return len(text)

note("hello")
"""
STAGES = (
    ("engine/protocol/",),
    ("engine/journal/calls.py", "engine/journal/call_output.py"),
    ("engine/journal/pipeline.py",),
    ("engine/journal/approval/gate.py", "engine/journal/approval/records.py", "engine/journal/approval/policy.py"),
    ("engine/journal/retracing.py", "engine/journal/reused_calls.py"),
    ("engine/journal/",),
    ("engine/sandbox/step.py",),
)
"""The files of each stage, from the socket to the commit; a file is of the first stage that names it."""
FORMS = AgentRequest, Intent, Outcome, JournalEntry, Open, Asked, Ended, ToolCall
"""The forms of an intent and its outcome. Its id and its arguments count as it, too."""
ARGUMENTS = {"text": "hello"}
ROOT = str(Path(snapshotd.__file__).parent) + "/"
Place = tuple[str, str]
"""A file, and a class in it; "" for its functions. The call passes it if one of them is given the intent, or returns it."""


def stage_of(place: Place) -> int | None:
    return next((number for number, files in enumerate(STAGES) if place[0].startswith(files)), None)


def place_of(frame: FrameType) -> Place:
    code = frame.f_code
    owner = code.co_qualname.partition(".")[0] if "." in code.co_qualname else ""
    return code.co_filename.removeprefix(ROOT), "" if owner == code.co_name else owner


def caller_of(frame: FrameType) -> FrameType | None:
    """The nearest caller that is in one of the stages."""
    caller = frame.f_back
    while caller is not None and stage_of(place_of(caller)) is None:
        caller = caller.f_back
    return caller


class Trace:
    """What the threads of agents' connections call, up to the first commit."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.climbs: list[tuple[Place, Place]] = []
        self.committed = False
        self.ids: set[str] = set()

    def _is_id(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.ids

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        if self.committed or not threading.current_thread().name.startswith("agent-"):
            return
        if frame.f_code.co_qualname == "SnapshotTable.commit":
            self.committed = True
        place, caller = place_of(frame), caller_of(frame)
        stage = stage_of(place)
        if stage is None or event not in ("call", "return"):
            return
        values = list(frame.f_locals.values()) if event == "call" else [returned]
        self.ids.update(value.call_id for value in values if isinstance(value, Intent))
        if any(isinstance(value, FORMS) or value == ARGUMENTS or self._is_id(value) for value in values):
            self.places.append(place)
        before = None if caller is None else stage_of(place_of(caller))
        if caller is not None and before is not None and before > stage:
            self.climbs.append((place_of(caller), place))


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    threading.setprofile(trace)
    try:
        yield trace
    finally:
        threading.setprofile(None)


def test_a_call_passes_few_places_and_none_calls_back_up(tmp_path: Path) -> None:
    with mind_rig.engine(tmp_path) as engine:
        agent = mind_rig.Agent(engine, engine.runs.create(CreateRequest(runtime=NO_ISOLATION))[0].id)
        with traced() as trace:
            result = engine.life._sessions.commands.exec(
                agent.sandbox,
                CommandFields(("python3", "-c", AGENT), cwd="/workspace"),
                sink=lambda *_: None,
                record=False,
            )
        assert result.exit_code == 0
        assert agent.head.call.name == "note"
        assert trace.committed
    places = set(trace.places)
    assert {stage_of(place) for place in places} == set(range(len(STAGES))), "it went through every stage"
    assert len(places) <= MOST_PLACES, sorted(places)
    assert trace.climbs == []
