"""What is taken for a token, and what is not."""

from __future__ import annotations

import pytest

from snapshotd.secrets.base import Found
from snapshotd.secrets.configured import Configured
from snapshotd.secrets.scan import Patterns, Scan
from snapshotd.secrets.shapes import NAMES
from tests.unit.secrets.samples import A9, CONTEXT, JWT, PEM, TOKENS

ORDINARY = [
    "task-force disk-encryption-with-a-long-name-2024 risk-averse",
    "sk-learn sk-toggleable__content-with-label sk-estimator-doc-link-no-number",
    "ghp_ gho_short github_pat_ hf_hub_download xoxb-1 glpat- npm_config_registry npm_package_json",
    "AKIAIOSFODNN7EXAMPLEX xAKIAIOSFODNN7EXAMPLE AKIA",
    "eyJhbGciOiJIUzI1NiJ9 is a header eyJ.eyJ.x",
    "-----BEGIN CERTIFICATE-----\nMIIEpAIBAAKCAQEA\n-----END CERTIFICATE-----\n-----BEGIN PUBLIC KEY-----\nabcdefghijklmnopqrst\n",
    "Bearer tokens are short. Bearer internationalization. Basic understanding of Basic authentication",
    "https://example.com:8080/a@b http://u@host/ https://user:$PASSWORD@host https://u:${X}@h mailto:a@b.c",
    "secret_access_key: unset aws_secret_access_key=short",
    "pypi-publish-action-with-words SG.abc.def AIzaShort",
    "[secret:] [secret:x:y] [SECRET] [secret:nobody:0123456789abcdef]",
    "",
    "🦜 naïve café 秘密 \x00\x1b[31m",
]


def found_in(text: str) -> list[tuple[str, str]]:
    pieces = Scan(Patterns(Configured({}))).feed(text.encode(), final=True)
    return [(piece.name, piece.value.decode()) for piece in pieces if isinstance(piece, Found)]


def found_in_pieces(*pieces: str) -> list[tuple[str, str]]:
    scan = Scan(Patterns(Configured({})))
    decided = [*(part for piece in pieces for part in scan.feed(piece.encode())), *scan.feed(b"", final=True)]
    return [(part.name, part.value.decode()) for part in decided if isinstance(part, Found)]


@pytest.mark.parametrize(("name", "token"), TOKENS)
def test_tokens_are_found_wherever_they_stand(name: str, token: str) -> None:
    for around in ("{}", "x = '{}'; y\n", "\n{}\n", "({})", "é{}é", '{{"k":"{}"}}'):
        assert found_in(around.format(token)) == [(name, token)]


ESCAPES = [
    *(
        "\\n",
        "\\t",
        "\\r",
        "\\b",
        "\\f",
        "\\u2028",
        "\\u00e9",
        "\\\\n",
        "a\\n",
        "\x1b[m",
        "\x1b[32m",
        "x\x1b[0m",
        "\x1b[1;31m\x1b[K",
    ),
    *(
        "\\u001b[32m",
        "\\u001B[0m",
        "\\x1b[01;31m",
        "\\033[1m",
        "\x1b[38;2;255;128;255;48;2;255;128;255m",
        "\\u001b[" + "1" * 40 + "m",
    ),
]


@pytest.mark.parametrize(("name", "token"), TOKENS)
def test_tokens_are_found_directly_after_an_escape(name: str, token: str) -> None:
    for before in ESCAPES:
        assert found_in(f"a key:{before}{token}") == [(name, token)]


@pytest.mark.parametrize("token", ["AKIAIOSFODNN7EXAMPLE", "sk-" + A9 * 4, "npm_" + A9 * 3, JWT])
@pytest.mark.parametrize("before", ESCAPES)
def test_tokens_after_an_escape_in_a_stream_that_is_cut_anywhere(token: str, before: str) -> None:
    text = f"{'x' * 70} the key:{before}{token} "
    (expected,) = found_in(text)
    for cut in range(len(text)):
        assert found_in_pieces(text[:cut], text[cut:]) == [expected]
    assert found_in_pieces(*text) == [expected]


NO_ESCAPES = [
    "n",
    "\\a",
    "\\xn",
    "\\u202",
    "\\u202x",
    "u2028",
    "[0m",
    "\x1b[0",
    "\x1b0m",
    "\x1b[ m",
    "\x1b[" + "1" * 41 + "m",
]


@pytest.mark.parametrize("before", NO_ESCAPES)
def test_what_only_looks_like_an_escape_is_none(before: str) -> None:
    text = f"a key:{before}AKIAIOSFODNN7EXAMPLE "
    assert found_in(text) == found_in_pieces(*text) == []


@pytest.mark.parametrize(("name", "context", "value"), CONTEXT)
def test_only_the_secret_part_is_taken(name: str, context: str, value: str) -> None:
    assert found_in(context.format(value)) == [(name, value)]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert found_in(text) == []


def test_a_private_key_that_was_cut_off() -> None:
    begin = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabcdef\n"
    assert found_in(f"$ head key\n{begin}$ ls") == [("private-key", begin)]


@pytest.mark.parametrize("prefix", ["-", "--", "id_rsa-"])
def test_a_private_key_in_a_diff_that_is_cut_anywhere(prefix: str) -> None:
    key = PEM.format("RSA PRIVATE KEY").replace("\n", f"\n{prefix}")
    text = f"{prefix}{key}\n"
    for cut in range(len(text)):
        assert found_in_pieces(text[:cut], text[cut:]) == [("private-key", key)]
    assert found_in_pieces(*text) == [("private-key", key)]


def test_the_user_of_a_url_can_be_a_token_too() -> None:
    token = "ghp_" + A9 * 3
    assert found_in(f"https://{token}:hunter2@host") == [("github-token", token), ("url-password", "hunter2")]
    assert found_in(f"https://{token}@host") == [("github-token", token)]
    marker = "[secret:github-token:0123456789abcdef]"
    assert found_in(f"https://user:{marker}@host https://{marker}@host") == []


def test_every_shape_has_an_example() -> None:
    assert {name for name, *_ in (*TOKENS, *CONTEXT)} == NAMES


@pytest.mark.parametrize(
    "before", ["glpat-", "sk-", "sk-ant-", "[secret:", "[sec", "AKIA", "://", "-----BEGIN PRIVATE KEY", "--"]
)
@pytest.mark.parametrize("name", ["private-key", "url-password"])
def test_what_overlaps_the_beginning_of_another_one(before: str, name: str) -> None:
    text = PEM.format("PRIVATE KEY") if name == "private-key" else "://user:hunter2@h"
    for cut in range(len(before)):
        if text.startswith(before[cut:]) or cut == 0:
            assert [found for found, _ in found_in(before[:cut] + text if cut else before + text)] == [name]
