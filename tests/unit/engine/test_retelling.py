"""A conversation that is told again: met word for word, except where a person has edited it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.held import HeldMessages, unanswered
from snapshotd.engine.journal.retelling import OtherWords, Retelling, edits, held_at
from snapshotd.types import Message, Snapshot
from tests.records import committed, fork, make_call, make_entry, started


@pytest.fixture
def catalog() -> Iterator[SqliteCatalog]:
    opened = SqliteCatalog(":memory:")
    yield opened
    opened.close()


def retold(catalog: SqliteCatalog, began: Snapshot, head: Snapshot, *, met: bool = True) -> Retelling:
    """`met`: the calls before the edits have been met."""
    return Retelling(catalog, began, head, edits(catalog, began, head), lambda _: met)


def say(retelling: Retelling, *texts: str) -> None:
    for text in texts:
        retelling.meet(Message("user", text))


def other(retelling: Retelling, text: str) -> str | None:
    """What is recorded in place of `text`."""
    with pytest.raises(OtherWords) as caught:
        say(retelling, text)
    return None if caught.value.recorded is None else str(caught.value.recorded.content)


def test_word_for_word(catalog: SqliteCatalog) -> None:
    _, began = started(catalog)
    head = committed(catalog, committed(catalog, began, "a", "b"), "c")
    retelling = retold(catalog, began, head)
    say(retelling, "a")
    assert other(retelling, "x") == "b"
    assert retelling.position == 1, "a mismatch takes nothing"
    say(retelling, "b", "c")
    assert retelling.position == 3
    assert other(retelling, "d") is None, "all is told"


def test_what_is_known_without_being_said(catalog: SqliteCatalog) -> None:
    _, began = started(catalog)
    head = committed(catalog, began, "a", "b", "c", "d")
    retelling = retold(catalog, began, head)
    retelling.skip(2)
    say(retelling, "c")
    retelling.reach(head.call.id, 2)
    assert retelling.position == 3, "it never goes back"
    retelling.reach(head.call.id, 4)
    assert other(retelling, "e") is None


@pytest.mark.parametrize(
    ("kept", "edited"),
    [
        pytest.param(1, ("B",), id="the last two become another one"),
        pytest.param(3, ("new",), id="one more is added"),
        pytest.param(1, (), id="the last two are dropped"),
        pytest.param(0, ("X", "Y", "Z", "W"), id="all are others"),
        pytest.param(1, ("b", "c"), id="they are recorded again, as with another result"),
    ],
)
def test_up_to_the_edit_it_is_the_old_conversation(catalog: SqliteCatalog, kept: int, edited: tuple[str, ...]) -> None:
    """The program hears what it says, and the edited conversation once it has met the calls before the edit."""
    line, began = started(catalog)
    source = committed(catalog, committed(catalog, began, "a"), "b", "c")
    forked = fork(source, line)
    catalog.trajectories.add([(forked, None)])
    edit = committed(
        catalog, source, *edited, trajectory=forked.id, after=source, keep=kept, seq=0, call=make_call("edit")
    )
    head = committed(catalog, edit, "later")
    met = False
    retelling = Retelling(catalog, began, head, edits(catalog, began, head), lambda _: met)
    for number, text in enumerate("abc"):
        assert [message.content for message in retelling.known_messages(0)] == list("abc"[:number])
        assert other(retelling, "other") == text
        say(retelling, text)
    assert [message.content for message in retelling.known_messages(1)] == ["b", "c"]
    assert other(retelling, "later") is None
    met = True
    after = [*"abc"[:kept], *edited]
    assert [message.content for message in retelling.known_messages(0)] == after
    assert retelling.position == edit.messages
    say(retelling, "later")
    assert other(retelling, "more") is None
    assert [message.content for message in catalog.conversations.read(head.id)] == [*after, "later"]


def test_a_skipped_call_behind_an_edit_leads_past_it(catalog: SqliteCatalog) -> None:
    line, began = started(catalog)
    source = committed(catalog, began, "a", "b")
    forked = fork(source, line)
    catalog.trajectories.add([(forked, None)])
    edit = committed(catalog, source, trajectory=forked.id, after=source, keep=1, seq=0, call=make_call("edit"))
    head = committed(catalog, edit, "later", "last")
    retelling = retold(catalog, began, head, met=False)
    retelling.reach(head.call.id, edit.messages + 1)
    assert [message.content for message in retelling.known_messages(0)] == ["a", "later"]
    say(retelling, "last")


def test_a_fork_without_an_edit_is_told_word_for_word(catalog: SqliteCatalog) -> None:
    line, began = started(catalog)
    source = committed(catalog, began, "a")
    forked = fork(source, line)
    catalog.trajectories.add([(forked, None)])
    head = committed(catalog, source, "b", trajectory=forked.id, seq=0)
    retelling = retold(catalog, began, head)
    say(retelling, "a")
    assert other(retelling, "B") == "b"
    say(retelling, "b")


def test_an_agents_own_tool_edit_is_no_edit(catalog: SqliteCatalog) -> None:
    """The first call of a fork may be called like the daemon's marker."""
    line, began = started(catalog)
    source = committed(catalog, began, "a")
    forked = fork(source, line)
    catalog.trajectories.add([(forked, None)])
    call = make_call("edit")
    entry = make_entry(source, id=call.id, name="edit", status=call.status, ended_at_ns=call.started_at_ns)
    head = committed(catalog, source, "b", trajectory=forked.id, seq=0, call=call, entries=[entry])
    assert edits(catalog, began, head) == []
    retelling = retold(catalog, began, head, met=False)
    say(retelling, "a", "b")


# -- messages that wait for a result -----------------------------------------------------------------------------------

HINT = Message("user", "try the log")
ASKED = Message("assistant", {"tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": "{}"}}]})
RESULT = Message("tool", {"tool_call_id": "c1", "content": "nothing"})


def hinted(catalog: SqliteCatalog, *behind: Message) -> tuple[Snapshot, Snapshot]:
    """Where a program began, and the head of a fork that waits with a hint; `behind`: what is recorded after it."""
    line, began = started(catalog)
    source = committed(catalog, began, "go", ASKED)
    forked = fork(source, line)
    catalog.trajectories.add([(forked, None)])
    held = make_call("edit", arguments={"held": [[HINT.role, HINT.content]]})
    head = committed(catalog, source, trajectory=forked.id, after=source, keep=2, seq=0, call=held)
    return began, committed(catalog, head, *behind) if behind else head


def tell(retelling: Retelling, *messages: Message) -> None:
    for message in messages:
        retelling.meet(message)


def test_a_hint_waits_for_the_result_of_the_call(catalog: SqliteCatalog) -> None:
    began, head = hinted(catalog)
    retelling = retold(catalog, began, head)
    say(retelling, "go")
    tell(retelling, ASKED)
    assert retelling.position == 2
    assert retelling.held.around(RESULT)[:2] == ((), (HINT,))
    assert retelling.held.around(Message("user", "else"))[:2] == ((HINT,), ()), "it never stays behind"
    assert held_at(catalog, began, head, []) == retelling.held
    assert held_at(catalog, began, head, [RESULT]).messages == (HINT,)
    assert held_at(catalog, began, head, [RESULT, HINT]).messages == ()


@pytest.mark.parametrize("behind", [(RESULT, HINT), (HINT, Message("user", "else"))], ids=["behind", "before"])
def test_a_recorded_hint_is_no_message_of_the_program(catalog: SqliteCatalog, behind: tuple[Message, ...]) -> None:
    began, head = hinted(catalog, *behind, Message("assistant", "done"))
    retelling = retold(catalog, began, head)
    say(retelling, "go")
    tell(retelling, ASKED, next(one for one in behind if one is not HINT), Message("assistant", "done"))
    assert retelling.position == head.messages
    assert retelling.held.messages == ()
    skipping = retold(catalog, began, head)
    skipping.reach(head.call.id, head.messages)
    assert skipping.held.messages == ()
    assert held_at(catalog, began, head, []).messages == ()


def test_a_hint_waits_for_all_results_of_a_message(catalog: SqliteCatalog) -> None:
    blocks = [{"type": "tool_use", "id": name, "name": "look", "input": {}} for name in ("a", "b")]
    open_calls = unanswered([Message("user", "go"), Message("assistant", blocks)])
    assert open_calls == ("a", "b")
    one, two = (Message("user", [{"type": "tool_result", "tool_use_id": name, "content": "x"}]) for name in ("b", "a"))
    before, after, held = HeldMessages((HINT,), open_calls).around(one)
    assert (before, after, held.unanswered) == ((), (), ("a",))
    assert held.around(two)[:2] == ((), (HINT,))
    assert unanswered([Message("assistant", blocks), one, two]) == ()
    assert unanswered([Message("assistant", blocks), Message("user", "never mind")]) == ()
