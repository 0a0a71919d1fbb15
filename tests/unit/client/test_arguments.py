"""Arguments that the client checks before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.history import MessageFields
from snapshotd.client import Snapshotd
from snapshotd.client.branching.variants import check_variants, variant_fields
from snapshotd.client.local.arguments import refs_of
from snapshotd.client.verbs.history import edit_fields
from snapshotd.errors import UsageError

HINT = MessageFields("user", "look at the log")


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "look at the log"}],
        ({"content": "look at the log", "role": "user"},),
        [("user", "look at the log")],
        [["user", "look at the log"]],
        iter([("user", "look at the log")]),
    ],
)
def test_a_message_is_an_object_or_a_pair(given: Any) -> None:
    (variant,) = variant_fields({"one": {"add_messages": given}})
    assert variant["edit"].add_messages == (HINT,)


def test_a_message_may_have_any_content() -> None:
    blocks = [{"type": "text", "text": "hi"}]
    fields = edit_fields(messages=[{"role": "user", "content": blocks}, ("assistant", None)])
    assert fields.messages == (MessageFields("user", blocks), MessageFields("assistant", None))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["hi"], r"add_messages\[0\]="),
        ([("user", "a"), ("user",)], r"add_messages\[1\]="),
        ([{"role": "user"}], r"add_messages\[0\]="),
        ([{"role": "user", "content": "a", "name": "b"}], r"add_messages\[0\]="),
        ([{"role": 1, "content": "a"}], r"add_messages\[0\]="),
        ([{"user": "a", "assistant": "b"}], r"add_messages\[0\]="),
        ("hi", "add_messages='hi'"),
        ({"role": "user", "content": "a"}, "add_messages="),
        (3, "add_messages=3"),
    ],
)
def test_whatever_else_is_refused_before_anything_is_sent(given: Any, named: str, tmp_path: Path) -> None:
    client = Snapshotd(tmp_path / "none", autostart=False)
    for ask in (
        lambda: client.edit("abc", add_messages=given),
        lambda: client.fork("abc", variants={"one": {"add_messages": given}}),
    ):
        with pytest.raises(UsageError, match=named):
            ask()


@pytest.mark.parametrize(
    ("key", "meant"), [("message", "add_messages"), ("file", "files"), ("secret", "secrets"), ("arg", "args")]
)
def test_a_wrong_key_of_a_variant_is_told_the_right_one(key: str, meant: str) -> None:
    given: Mapping[str, Any] = {key: {}}
    with pytest.raises(UsageError, match=f"unknown key '{key}'; did you mean '{meant}'"):
        check_variants({"one": given})


def test_compare_takes_a_list_or_one_argument_for_each(tmp_path: Path) -> None:
    assert refs_of(("a", "b")) == refs_of((["a", "b"],)) == refs_of((("a", "b"),)) == ["a", "b"]
    client = Snapshotd(tmp_path / "none", autostart=False)
    for given in ((["a"], "b"), ({"a", "b"},), (["a", 3],)):
        with pytest.raises(UsageError, match=r"refs(\[1\])?="):
            client.compare(*given)  # type: ignore[arg-type]
