"""Which rule decides, and what is said about a file that is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.journal.approval import policy
from snapshotd.engine.journal.approval.policy import MAX_MATCHED_CHARS, PolicyFile, Ruling, parse
from snapshotd.errors import UsageError
from snapshotd.types import SideEffect

LOCAL, IRREVERSIBLE = SideEffect.LOCAL, SideEffect.IRREVERSIBLE


def action(text: str, tool: str, arguments: Any = None, side_effect: SideEffect = LOCAL) -> str:
    return parse(text, "policy").judge(tool, arguments, side_effect).action


def test_the_first_rule_that_matches_decides() -> None:
    text = """
[[rule]]
name = "deploy_test"
action = "allow"
[[rule]]
name = "deploy_*"
action = "approve"
reason = "look first"
expires = "90m"
[[rule]]
side_effect = "irreversible"
action = "deny"
[defaults]
expires = "2d"
"""
    found = parse(text, "policy")
    assert found.judge("deploy_test", {}, IRREVERSIBLE) == Ruling("allow", 2 * 86400)
    assert found.judge("deploy_all", {}, LOCAL) == Ruling("approve", 5400, "look first")
    assert found.judge("mail", {}, IRREVERSIBLE).action == "deny"
    assert found.judge("mail", {}, LOCAL).action == "allow"
    assert found.judge("Deploy_all", {}, LOCAL).action == "allow"


@pytest.mark.parametrize(
    ("path", "pattern", "arguments", "matches"),
    [
        ("command", "rm", {"command": "xrmx"}, True),
        ("command", "^rm", {"command": "xrm"}, False),
        ("command", "rm", {}, False),
        ("a.b.c", "x", {"a": {"b": {"c": "x"}}}, True),
        ("a.1", "^y$", {"a": ["x", "y"]}, True),
        ("a.2", "", {"a": ["x", "y"]}, False),
        ("n", "^12$", {"n": 12}, True),
        ("n", "true", {"n": True}, True),
        ("", '"n": 1', {"n": 1}, True),
        ("a", "é", {"a": ["é"]}, True),
        ("command", "x", {"command": "y" * (MAX_MATCHED_CHARS + 1)}, True),
        ("a", "x", "text", False),
        ("-1", "", ["x"], False),
    ],
)
def test_arguments(path: str, pattern: str, arguments: Any, matches: bool) -> None:
    text = f"[[rule]]\narguments = {{ {path!r} = {pattern!r} }}\naction = 'deny'"
    assert action(text, "any", arguments) == ("deny" if matches else "allow")


def test_what_is_too_long_to_look_at_is_not_let_through() -> None:
    text = "[[rule]]\narguments = { c = '.' }\naction = 'allow'\n[[rule]]\naction = 'deny'"
    assert action(text, "t", {"c": "short"}) == "allow"
    assert action(text, "t", {"c": "x" * (MAX_MATCHED_CHARS + 1)}) == "deny"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[rule]]\naction = \n", "line 2"),
        ("\n\n[[rule]]\naction = 'ask'", "number 1 in line 3"),
        ("[[rule]]\nname = 'x'", "needs an `action`"),
        ("[[rule]]\naction = 'deny'\nexpires = '2 hours'", "unit"),
        (
            "[[rule]]\naction = 'deny'\n[[rule]]\naction = 'deny'\ntools = 'x'",
            "number 2 in line 3 has the unknown key 'tools'",
        ),
        ("[[rule]]\naction = 'deny'\narguments = { a = '(' }", "no regular expression"),
        ("[[rule]]\naction = 'deny'\nexpires = '0s'", "unit"),
        ("[[rule]]\naction = 'deny'\nside_effect = 'bad'", "none of local"),
        ("[[rule]]\naction = 'deny'\narguments = { a = 1 }", "table of patterns"),
        ("rule = 1", "tables"),
        ("[rules]", "unknown key 'rules'"),
        ("[defaults]\naction = 'deny'", "[defaults] has the unknown key"),
        ("[webhook]", "needs a `url`"),
        ("webhook = 1", "as a table"),
        ("[webhook]\nurl = 'file:///etc/passwd'", "http"),
        ("[[rule]]\naction = 'deny'\nname = 1", "`name` as a text"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text, "/state/policy.toml")
    assert said in raised.value.message
    assert "/state/policy.toml" in raised.value.message


def test_the_file_is_read_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PolicyFile(tmp_path / "policy.toml")
    assert file.read() == policy.ApprovalPolicy()
    file.path.write_text("[[rule]]\naction = 'deny'")
    assert [rule.action for rule in file.read().rules] == ["deny"]
    reads = []
    original = policy.parse
    monkeypatch.setattr(policy, "parse", lambda *args: reads.append(1) or original(*args))  # type: ignore[func-returns-value]
    for _ in range(3):
        file.read()
    assert reads == []
    other = tmp_path / "other"
    other.write_text("[[rule]]\naction = 'oops'")
    os.rename(other, file.path)
    for _ in range(2):
        with pytest.raises(UsageError, match="needs an `action`"):
            file.read()
    assert reads == [1]
    file.path.unlink()
    assert file.read() == policy.ApprovalPolicy()


def test_a_file_that_cannot_be_read_gates_everything(tmp_path: Path) -> None:
    file = PolicyFile(tmp_path / "policy.toml")
    file.path.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        file.read()
    file.path.rmdir()
    file.path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        file.read()
    file.path.write_bytes(b"#" * (policy.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="more than"):
        file.read()
