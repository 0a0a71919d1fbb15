"""What goes in through the funnel and comes out again: texts, JSON and streams, with secrets planted anywhere."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.parse
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.secrets import redactor as redactor_module
from snapshotd.secrets.base import MARKER, MARKER_BYTES
from snapshotd.secrets.configured import MAX_TOTAL_BYTES, MAX_VALUES
from snapshotd.secrets.redactor import MAX_JSON_LEVELS, Funnel, Redactor
from snapshotd.secrets.vault import Vault
from snapshotd.types import TrajectoryID, new_id
from tests import long
from tests.unit.secrets.samples import CONTEXT, TOKENS

VALUES = {
    "env-PASSWORD": "hunter2",
    "env-LONGER": "hunter2-and-more",
    "env-ODD": 'p"ä\\s/s w+o%r?d',
    "key-file": "line one\nline two\nline three",
    "env-REPEAT": "ababab",
    "tail": "ored!1",
}
PLANTED = [*VALUES.values(), *(token for _, token in TOKENS), *(context.format(value) for _, context, value in CONTEXT)]
ESCAPES = ["\\n", "\\u00e9", "\x1b[32m", "\\u001b[1;31m", "\x1b[", "\\u"]
BEGINNINGS = ["[secret:", "[secret:env-PASSWORD:", "-----", "sk-", "://", "uthorization: ", "Bearer "]
CUT = [*BEGINNINGS, *(secret[: len(secret) // 2] for secret in PLANTED)]
PARTS = st.one_of(
    st.sampled_from(PLANTED),
    st.sampled_from(CUT),
    st.sampled_from(ESCAPES),
    st.text(max_size=5),
    st.text("ab\n :@-_=", max_size=8),
)
TEXTS = st.lists(PARTS).map("".join)
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
"""Machines are at times ten times slower than usual."""


def configured_funnel(redactor: Redactor) -> Funnel:
    return redactor.funnel(TrajectoryID(new_id()), VALUES)


@pytest.fixture(scope="module")
def funnel(redactor: Redactor) -> Funnel:
    return configured_funnel(redactor)


def forms(value: str) -> list[str]:
    """In which a program may print a value, each made in the plain way."""
    data = value.encode()
    return [
        value,
        data.hex(),
        data.hex().upper(),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(json.dumps({"k": value})),
        urllib.parse.quote(value),
        urllib.parse.quote(value, safe=""),
        urllib.parse.urlencode({"k": value}),
        *(base64.b64encode(b"x" * before + data + b"y" * after).decode() for before in range(4) for after in range(3)),
        *(
            base64.urlsafe_b64encode(b"x" * before + data + b"y" * after).decode()
            for before in range(4)
            for after in range(3)
        ),
        value.replace("\n", "\r\n"),
    ]


def base64_core(value: bytes, before: int) -> str:
    """The characters of a value's base64 that depend on it alone."""
    one, other = (base64.b64encode(fill * before + value + fill * 3).decode() for fill in (b"\x00", b"\xff"))
    return "".join(a for a, b in zip(one, other, strict=True) if a == b)


@pytest.mark.parametrize("name", VALUES)
def test_configured_values_are_found_in_every_form(funnel: Funnel, name: str) -> None:
    value = VALUES[name]
    cores = [base64_core(value.encode(), before) for before in range(3)]
    for form in forms(value):
        text = f"before {form} after"
        concealed = funnel.conceal_text(text)
        assert f"[secret:{name}:" in concealed or "[secret:env-PASSWORD:" in concealed, form
        plain = MARKER.sub("", concealed)
        assert value not in plain
        assert not any(core in plain for core in cores)
        assert funnel.reveal_text(concealed) == text


@pytest.mark.parametrize(
    "form",
    [
        "a%26b%3Cc%3Ed!'()*%20%2F~%C3%A9%E2%80%A8",  # encodeURIComponent
        "a%26b%3Cc%3Ed%21%27%28%29*+%2F~%C3%A9%E2%80%A8",  # quote_plus that leaves the asterisk
        "a%26b%3Cc%3Ed%21%27%28%29*+%2F%7E%C3%A9%E2%80%A8",  # URLSearchParams
        "a\\u0026b\\u003cc\\u003ed!'()* /~é\\u2028",  # Go's JSON
        "a\\\\u0026b\\\\u003cc\\\\u003ed!'()* /~é\\\\u2028",  # and within JSON
    ],
)
def test_configured_values_as_javascript_and_go_write_them(redactor: Redactor, form: str) -> None:
    funnel = redactor.funnel(TrajectoryID(new_id()), {"odd": "a&b<c>d!'()* /~é\u2028"})
    concealed = funnel.conceal_text(f"x={form}&y")
    assert MARKER.sub("", concealed) == "x=&y"
    assert funnel.reveal_text(concealed) == f"x={form}&y"


def test_a_token_in_the_json_of_a_reply(funnel: Funnel) -> None:
    body = json.dumps({"content": "Here is the key:\nsk-proj-" + "Ab3d" * 8})
    assert (
        re.sub(":[0-9a-f]{16}", "", funnel.conceal_text(body))
        == '{"content": "Here is the key:\\n[secret:openai-key]"}'
    )
    assert streamed(funnel, [body.encode()]) == funnel.conceal_text(body).encode()
    assert funnel.reveal_text(funnel.conceal_text(body)) == body


def test_the_longest_value_wins(funnel: Funnel) -> None:
    markers = MARKER.findall(funnel.conceal_text("hunter2-and-more hunter2-and-mor"))
    assert [name for name, _ in markers] == ["env-LONGER", "env-PASSWORD"]


def test_equal_secrets_have_equal_markers_in_all_trajectories(redactor: Redactor) -> None:
    text = "ghp_" + "Ab3d" * 9
    assert configured_funnel(redactor).conceal_text(text) == configured_funnel(redactor).conceal_text(text)


def test_where_a_value_and_a_token_overlap_nothing_is_left(funnel: Funnel) -> None:
    token = "ghp_" + "Ab3d" * 8
    for text in (token + "hunter2" + "Ab3d" * 4, token + "hunter2-and-more", "hunter2" + token + "ored!1"):
        concealed = funnel.conceal_text(text)
        assert MARKER.sub("", concealed) == ""
        assert funnel.reveal_text(concealed) == text


@given(text=TEXTS)
@settings(SLOW)
def test_what_is_concealed_is_revealed(funnel: Funnel, text: str) -> None:
    concealed = funnel.conceal_text(text)
    plain = MARKER.sub("\n", concealed)
    assert not any(value in plain for value in VALUES.values() if "\n" not in value)
    assert funnel.reveal_text(concealed) == text
    assert funnel.reveal_text(funnel.conceal_text(concealed)) == text


@given(text=st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=20))
@settings(SLOW)
def test_lone_surrogates_survive(funnel: Funnel, text: str) -> None:
    both = f"{text}hunter2{text}"
    concealed = funnel.conceal_text(both)
    assert "hunter2" not in concealed
    assert funnel.reveal_text(concealed) == both


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


@given(value=JSON)
@settings(SLOW, max_examples=50)
def test_json_is_concealed_and_revealed(funnel: Funnel, value: Any) -> None:
    before = json.dumps(value)
    concealed = funnel.conceal(value)
    assert json.dumps(value) == before
    assert "hunter2" not in json.dumps(concealed)
    revealed = funnel.reveal(concealed)
    assert revealed == value
    assert json.dumps(revealed) == before  # the order of keys too


def test_an_aws_secret_under_its_key_in_json(funnel: Funnel) -> None:
    value = {"SecretAccessKey": "a/B1" * 10, "aws_secret_access_key": "a/B1" * 10, "digest": "a/B1" * 10}
    concealed = funnel.conceal(value)
    assert [MARKER.fullmatch(text) is not None for text in concealed.values()] == [True, True, False]
    assert funnel.reveal(concealed) == value


def test_json_that_nests_too_deep(funnel: Funnel) -> None:
    value: Any = "hunter2"
    for _ in range(MAX_JSON_LEVELS):
        value = [value]
    assert funnel.reveal(funnel.conceal(value)) == value
    with pytest.raises(LimitExceeded):
        funnel.conceal([value])
    with pytest.raises(LimitExceeded):
        funnel.reveal({"k": value})


def streamed(funnel: Funnel, pieces: Iterable[bytes]) -> bytes:
    out: list[bytes] = []
    concealer = funnel.concealer(out.append)
    for piece in pieces:
        concealer.write(piece)
    concealer.finish()
    return b"".join(out)


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return [*pieces, data]


@given(text=TEXTS, raw=st.binary(max_size=8), lengths=st.lists(st.integers(0, 12)))
@settings(SLOW, max_examples=long.size(100, 200))
def test_a_stream_is_the_same_however_it_is_cut(funnel: Funnel, text: str, raw: bytes, lengths: list[int]) -> None:
    data = text.encode() + raw + text.encode()
    whole = streamed(funnel, [data])
    assert streamed(funnel, cut(data, lengths)) == whole
    assert streamed(funnel, (data[at : at + 1] for at in range(len(data)))) == whole
    assert b"hunter2" not in whole
    assert b"".join(funnel.reveal_stream(cut(whole, lengths))) == data
    assert b"".join(funnel.reveal_stream(whole[at : at + 1] for at in range(len(whole)))) == data


@given(text=TEXTS)
@settings(SLOW, max_examples=50)
def test_text_and_stream_agree(funnel: Funnel, text: str) -> None:
    assert streamed(funnel, [text.encode()]) == funnel.conceal_text(text).encode()


def test_long_streams_are_cut_inside_too(funnel: Funnel) -> None:
    data = b"".join(b"%d hunter2 %s\n" % (number, b"x" * (number % 89)) for number in range(5000))
    assert len(data) > 4 * (64 << 10)
    whole = streamed(funnel, [data])
    assert b"hunter2" not in whole
    assert whole == streamed(funnel, cut(data, [7, 65_535, 65_537, 131_071]))
    assert funnel.conceal_text(data.decode()).encode() == whole
    assert b"".join(funnel.reveal_stream([whole])) == data


@pytest.mark.parametrize(
    "text",
    [
        "$ ",
        "password: ",
        "Compiling a v1.2.3\n",
        "50%\r",
        "ls\n",
        "https://example.com/a z",
        "\x1b[32mok\x1b[0m",
        "task-sk-x y",
        "hunter3",
    ],
)
def test_a_terminal_sees_at_once_what_begins_no_secret(funnel: Funnel, text: str) -> None:
    out: list[bytes] = []
    concealer = funnel.concealer(out.append)
    concealer.write(text.encode())
    assert b"".join(out) == text.encode()


def test_only_what_may_be_a_secret_is_held_back(funnel: Funnel) -> None:
    out: list[bytes] = []
    concealer = funnel.concealer(out.append)
    concealer.write(b"token: hunt")
    assert out == [b"token: "]
    concealer.write(b"ing\n")
    assert out == [b"token: ", b"hunting\n"]
    concealer.write(b"hunter2")
    assert len(out) == 2  # it may still become hunter2-and-more
    concealer.write(b"\n")
    assert MARKER_BYTES.fullmatch(out[2].rstrip(b"\n"))
    concealer.write(b"ghp_")
    concealer.finish()
    assert out[3:] == [b"ghp_"]


def test_what_is_held_back_is_bounded(funnel: Funnel) -> None:
    out: list[bytes] = []
    concealer = funnel.concealer(out.append)
    data = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"A" * 200_000
    concealer.write(data)
    assert sum(map(len, out)) > len(data) - 140_000
    concealer.finish()


def test_a_failing_writer_is_heard(funnel: Funnel) -> None:
    def full(_data: bytes) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        funnel.concealer(full).write(b"x\n")


def test_only_who_recorded_a_marker_sees_the_secret(redactor: Redactor) -> None:
    owner, stranger = TrajectoryID(new_id()), TrajectoryID(new_id())
    marker = redactor.funnel(owner, VALUES).conceal_text("hunter2")
    assert MARKER.fullmatch(marker)
    assert redactor.funnel(stranger).reveal_text(marker) == marker
    assert redactor.funnel(stranger).reveal({marker: [marker]}) == {marker: [marker]}
    assert b"".join(redactor.funnel(stranger).reveal_stream([marker.encode()])) == marker.encode()
    assert redactor.funnel(stranger, ancestors=[owner]).reveal_text(marker) == "hunter2"
    assert redactor.funnel(stranger, VALUES).conceal_text(marker) == marker  # nor is it recorded by repeating it
    assert redactor.funnel(stranger).reveal_text(marker) == marker


def test_a_made_up_marker_hides_no_secret(redactor: Redactor) -> None:
    """The names of markers are taken on trust only when they are names that there are."""
    funnel = redactor.funnel(TrajectoryID(new_id()), {"pin": "0123456789abcdef", "word": "correct-horse"})
    assert "correct-horse" not in funnel.conceal_text("[secret:correct-horse:0011223344556677]")
    assert "0123456789abcdef" not in funnel.conceal_text("[secret:unknown:0123456789abcdef]")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"short": "12345"}, UsageError),
        ({"": "long enough"}, UsageError),
        ({"a:b": "long enough"}, UsageError),
        ({"a]": "long enough"}, UsageError),
        ({"x" * 65: "long enough"}, UsageError),
        ({"surrogate": "long enough\udc80"}, UsageError),
        ({"long": "x" * (MAX_TOTAL_BYTES + 1)}, LimitExceeded),
        ({f"n{number}": "long enough" for number in range(MAX_VALUES + 1)}, LimitExceeded),
    ],
)
def test_values_that_cannot_be_searched_for(redactor: Redactor, values: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        redactor.funnel(TrajectoryID(new_id()), values)
    assert "long enough" not in str(caught.value)
    assert "12345" not in str(caught.value)


def test_as_much_as_may_be_configured(redactor: Redactor) -> None:
    value = "".join(f"{number:05}" for number in range(MAX_TOTAL_BYTES // 5))
    funnel = redactor.funnel(TrajectoryID(new_id()), {"big": value})
    assert MARKER.fullmatch(funnel.conceal_text(value))
    assert streamed(funnel, cut(value.encode() + b"!", [1000] * 20)).startswith(b"[secret:big:")


HOSTILE = [
    *(
        "eyJ",
        ".eyJ",
        ".eyJaaaaaaaaaaaa",
        "-----BEGIN RSA PRIVATE KEY-----",
        "sk-",
        " sk-",
        "://a:b",
        "[secret:",
        "[sec",
        "Authorization: ",
    ),
    *("secret_access_key\\\\\\ ", "ghp_", "Basic aaaaaaaa ", "aaaaab", "-", "a"),
    "://" + "a" * 100 + ":" + "b" * 250,
    "Bearer " + "a" * 4000 + " ",
    "-----BEGIN RSA PRIVATE KEY-----" + "-a" * 32_000,
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_hostile_text_takes_no_longer_than_its_length(funnel: Funnel, unit: str) -> None:
    """What begins tokens again and again. Backtracking would take hours; the suite's time limit is the bound."""
    length = long.size(200_000, 1_000_000)
    whole = streamed(funnel, [(unit * (length // len(unit))).encode()])
    assert len(whole) >= length * 0.03


@pytest.mark.parametrize(
    "unit", ["-", "://", "[", "Authorization: ", "eyJ.", "-----BEGIN RSA PRIVATE KEY-----" + "-a" * 32_000]
)
def test_many_hostile_bytes_in_one_piece(funnel: Funnel, unit: str) -> None:
    data = (unit * (long.size(500_000, 10_000_000) // len(unit))).encode()
    whole = streamed(funnel, [data])
    assert whole == data


def test_one_funnel_in_many_threads(vault: Vault) -> None:
    funnel = Redactor(vault).funnel(TrajectoryID(new_id()), VALUES)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(50):
                text = f"hunter2 ghp_{number:018}{step:018}"
                concealed = funnel.conceal_text(text)
                assert "hunter2" not in concealed
                assert funnel.reveal_text(concealed) == text
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_funnel_remembers_a_bounded_number_of_markers(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redactor_module, "_REMEMBERED", 10)
    funnel = Redactor(vault).funnel(TrajectoryID(new_id()))
    text = " ".join(f"ghp_{number:036}" for number in range(40))
    for part in (text, *text.split(), text):
        assert funnel.reveal_text(funnel.conceal_text(part)) == part
    assert len(funnel._kept) <= 50
