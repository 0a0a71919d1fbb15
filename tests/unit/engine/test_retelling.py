"""A conversation that is told again: met word for word, except where a person has edited it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.mind.retelling import OtherWords, Retelling
from snapshotd.types import Message
from tests.records import committed, fork, make_call, started


@pytest.fixture
def catalog() -> Iterator[SqliteCatalog]:
    opened = SqliteCatalog(":memory:")
    yield opened
    opened.close()


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
    retelling = Retelling(catalog, began, head)
    say(retelling, "a")
    assert other(retelling, "x") == "b"
    assert retelling.position == 1, "a mismatch takes nothing"
    say(retelling, "b", "c")
    assert retelling.position == 3
    assert other(retelling, "d") is None, "all is told"


def test_what_is_known_without_being_said(catalog: SqliteCatalog) -> None:
    _, began = started(catalog)
    head = committed(catalog, began, "a", "b", "c", "d")
    retelling = Retelling(catalog, began, head)
    retelling.skip(2)
    say(retelling, "c")
    retelling.reach(2)
    assert retelling.position == 3, "it never goes back"
    retelling.reach(4)
    assert other(retelling, "e") is None


@pytest.mark.parametrize(
    ("kept", "edited", "met"),
    [
        pytest.param(1, ("B",), ["a", "b", "c"], id="the last two become another one"),
        pytest.param(3, ("new",), ["a", "b", "c"], id="one more is added"),
        pytest.param(1, (), ["a", "b", "c"], id="the last two are dropped"),
        pytest.param(0, ("X", "Y", "Z", "W"), ["a", "b", "c"], id="all are others"),
    ],
)
def test_where_a_person_has_edited_what_was_said_is_passed_over(
    catalog: SqliteCatalog, kept: int, edited: tuple[str, ...], met: list[str]
) -> None:
    line, began = started(catalog)
    source = committed(catalog, committed(catalog, began, "a"), "b", "c")
    forked = fork(source, line)
    catalog.add_trajectories([(forked, None)])
    edit = committed(
        catalog, source, *edited, trajectory=forked.id, after=source, keep=kept, seq=0, call=make_call("edit")
    )
    head = committed(catalog, edit, "later")
    retelling = Retelling(catalog, began, head)
    say(retelling, *met)
    assert retelling.position == edit.messages
    say(retelling, "later")
    assert other(retelling, "more") is None
    whole = [message.content for message in catalog.conversation(head.id)]
    assert whole == [*["a", "b", "c"][:kept], *edited, "later"]


def test_a_fork_without_an_edit_is_told_word_for_word(catalog: SqliteCatalog) -> None:
    line, began = started(catalog)
    source = committed(catalog, began, "a")
    forked = fork(source, line)
    catalog.add_trajectories([(forked, None)])
    head = committed(catalog, source, "b", trajectory=forked.id, seq=0)
    retelling = Retelling(catalog, began, head)
    say(retelling, "a")
    assert other(retelling, "B") == "b"
    say(retelling, "b")
