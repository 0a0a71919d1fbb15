"""A conversation that is told again: met word for word, except where a person has edited it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.mind.retelling import OtherWords, Retelling, edits
from snapshotd.types import Message, Snapshot
from tests.records import committed, fork, make_call, started


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
    catalog.add_trajectories([(forked, None)])
    edit = committed(
        catalog, source, *edited, trajectory=forked.id, after=source, keep=kept, seq=0, call=make_call("edit")
    )
    head = committed(catalog, edit, "later")
    met = False
    retelling = Retelling(catalog, began, head, edits(catalog, began, head), lambda _: met)
    for number, text in enumerate("abc"):
        assert [message.content for message in retelling.known(0)] == list("abc"[:number])
        assert other(retelling, "other") == text
        say(retelling, text)
    assert [message.content for message in retelling.known(1)] == ["b", "c"]
    assert other(retelling, "later") is None
    met = True
    after = [*"abc"[:kept], *edited]
    assert [message.content for message in retelling.known(0)] == after
    assert retelling.position == edit.messages
    say(retelling, "later")
    assert other(retelling, "more") is None
    assert [message.content for message in catalog.conversation(head.id)] == [*after, "later"]


def test_a_skipped_call_behind_an_edit_leads_past_it(catalog: SqliteCatalog) -> None:
    line, began = started(catalog)
    source = committed(catalog, began, "a", "b")
    forked = fork(source, line)
    catalog.add_trajectories([(forked, None)])
    edit = committed(catalog, source, trajectory=forked.id, after=source, keep=1, seq=0, call=make_call("edit"))
    head = committed(catalog, edit, "later", "last")
    retelling = retold(catalog, began, head, met=False)
    retelling.reach(head.call.id, edit.messages + 1)
    assert [message.content for message in retelling.known(0)] == ["a", "later"]
    say(retelling, "last")


def test_a_fork_without_an_edit_is_told_word_for_word(catalog: SqliteCatalog) -> None:
    line, began = started(catalog)
    source = committed(catalog, began, "a")
    forked = fork(source, line)
    catalog.add_trajectories([(forked, None)])
    head = committed(catalog, source, "b", trajectory=forked.id, seq=0)
    retelling = retold(catalog, began, head)
    say(retelling, "a")
    assert other(retelling, "B") == "b"
    say(retelling, "b")
