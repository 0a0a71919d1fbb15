"""Tokens: kept as digests alone, known by their whole text, and by nothing after they were revoked or have expired."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from snapshotd.api.operation import ADMIN, APPROVE, READ, RUN, Scope
from snapshotd.daemon.access.tokens import PREFIX, TOKENS_MAX, Token, Tokens
from snapshotd.errors import Conflict, DataLoss, LimitExceeded, NotFound, NotPermitted, UsageError, VersionMismatch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def tokens(path: Path) -> Tokens:
    return Tokens(path)


def test_a_token_is_known_by_its_text_and_kept_as_a_digest(tokens: Tokens, path: Path) -> None:
    made, text = tokens.create("ci", [RUN], tenant="acme")
    caller, _ = tokens.check(text)
    assert (caller.name, caller.tenant, caller.token, caller.scopes) == ("ci", "acme", made.id, {READ, RUN})
    secret = text.removeprefix(f"{PREFIX}{made.id}_")
    assert len(secret) == 43
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert Tokens(path).check(text) == (caller, None)


@pytest.mark.parametrize(
    ("scopes", "opens"),
    [
        ([READ], {READ}),
        ([RUN], {READ, RUN}),
        ([APPROVE], {READ, APPROVE}),
        ([RUN, APPROVE], {READ, RUN, APPROVE}),
        ([ADMIN], {READ, RUN, APPROVE, ADMIN}),
    ],
)
def test_scopes_open_what_they_need(tokens: Tokens, scopes: list[Scope], opens: set[Scope]) -> None:
    caller, _ = tokens.check(tokens.create("t", scopes)[1])
    assert caller.scopes == opens
    assert caller.tenant == (None if ADMIN in scopes else "default")
    for scope in (READ, RUN, APPROVE, ADMIN):
        if scope in opens:
            caller.check_scope(scope)
        else:
            with pytest.raises(NotPermitted, match=f"scope {scope}"):
                caller.check_scope(scope)


def test_nothing_else_is_a_token(tokens: Tokens, tmp_path: Path) -> None:
    _, text = tokens.create("ci", [READ])
    _, foreign = Tokens(tmp_path / "others.json").create("ci", [READ])
    for wrong in ("", text[:-1], text + "x", text.swapcase(), foreign, PREFIX, "\ud800", text.partition("_")[2]):
        with pytest.raises(NotPermitted) as refused:
            tokens.check(wrong)
        assert len(wrong) < 12 or wrong not in refused.value.message


def test_an_expired_token_opens_nothing(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    made, text = tokens.create("short", [READ], expires_at_ns=now + 60_000_000_000)
    assert tokens.check(text)[1] == made.expires_at_ns
    monkeypatch.setattr(time, "time_ns", lambda: made.expires_at_ns)
    with pytest.raises(NotPermitted):
        tokens.check(text)
    assert [one.name for one in tokens.list()] == ["short"]


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_revoked_token_opens_nothing_in_any_process(tokens: Tokens, path: Path, by: str) -> None:
    made, text = tokens.create("ci", [READ])
    _, kept = tokens.create("other", [READ])
    elsewhere = Tokens(path)
    assert elsewhere.check(text)[0].name == "ci"
    assert tokens.revoke(getattr(made, by)) == made
    for one in (tokens, elsewhere):
        with pytest.raises(NotPermitted):
            one.check(text)
        assert one.check(kept)[0].name == "other"
    with pytest.raises(NotFound):
        tokens.revoke(made.id)


def test_what_cannot_be_a_token_is_refused(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens.create("ci", [READ])
    for name, scopes, tenant, expires, error in (
        ("ci", [READ], None, None, Conflict),
        ("a/b", [READ], None, None, UsageError),
        ("x", [], None, None, UsageError),
        ("x", ["root"], None, None, UsageError),
        ("x", [ADMIN], "acme", None, UsageError),
        ("x", [READ], "a/b", None, UsageError),
        ("x", [READ], "e2b", None, UsageError),
        ("x", [READ], None, 1, UsageError),
    ):
        with pytest.raises(error):
            tokens.create(name, scopes, tenant=tenant, expires_at_ns=expires)  # type: ignore[arg-type]
    monkeypatch.setattr("snapshotd.daemon.access.tokens.TOKENS_MAX", 1)
    with pytest.raises(LimitExceeded):
        tokens.create("x", [READ])
    assert TOKENS_MAX > 1
    assert [one.name for one in tokens.list()] == ["ci"]


def test_a_damaged_or_newer_file_opens_nothing(tokens: Tokens, path: Path) -> None:
    _, text = tokens.create("ci", [READ])
    for content, error in ((b'{"format": 1, "tok', DataLoss), (b'{"format": 2, "tokens": []}', VersionMismatch)):
        path.write_bytes(content)
        with pytest.raises(error):
            tokens.check(text)
    path.unlink()
    with pytest.raises(NotPermitted):
        tokens.check(text)


def test_a_token_is_shown_once(tokens: Tokens) -> None:
    made, text = tokens.create("ci", [READ])
    assert text not in repr(made) + repr(tokens.check(text))
    assert isinstance(made, Token)
