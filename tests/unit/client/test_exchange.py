"""Answers are taken apart wherever their bytes are cut, and what is no answer is never taken for one."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.api.wire import FRAME_DATA, FRAME_EVENT, FRAME_HEADER, FRAME_MAX_BYTES
from snapshotd.client.exchange import (
    DaemonAway,
    FrameSplitter,
    HttpAnswer,
    LineSplitter,
    begin_bytes,
    chunk_bytes,
    new_key,
    request_bytes,
    unreachable,
    use_keys,
)
from snapshotd.errors import InternalError, LimitExceeded, NotFound, NotPermitted

BODY = b"one\r\n0\r\n\r\ntwo" * 7
HEAD = b"HTTP/1.1 200 OK\r\nX-Thing: a: b \r\n"
ANSWERS = {
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "chunks": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(map(chunk_bytes, (BODY[:1], BODY[1:40], BODY[40:], b""))),
    "end": HEAD + b"\r\n" + BODY,
}


def taken(answer: HttpAnswer, data: bytes, sizes: Callable[[], int]) -> bytes:
    """Feed it in pieces, then the connection's end."""
    body, at = b"", 0
    while at < len(data):
        count = sizes()
        body += answer.feed(data[at : at + count])
        at += count
    return body + answer.feed(b"")


@pytest.mark.parametrize("form", ANSWERS)
@pytest.mark.parametrize("seed", range(20))
def test_an_answer_is_the_same_wherever_it_is_cut(form: str, seed: int) -> None:
    rng = random.Random(seed)
    answer = HttpAnswer()
    assert taken(answer, ANSWERS[form], lambda: rng.randint(1, 1 + 8 * seed)) == BODY
    assert (answer.status, answer.headers["x-thing"], answer.ended) == (200, "a: b", True)


@pytest.mark.parametrize("form", ["length", "chunks"])
def test_an_answer_that_breaks_off_is_no_answer(form: str) -> None:
    whole = ANSWERS[form].removesuffix(b"\r\n") if form == "chunks" else ANSWERS[form]
    for end in range(len(whole) - 2):
        with pytest.raises(DaemonAway):
            taken(HttpAnswer(), whole[:end], lambda: 1 << 20)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"x" * (65 << 10),
    ],
)
def test_what_is_no_answer_is_refused(data: bytes) -> None:
    with pytest.raises(DaemonAway):
        HttpAnswer().feed(data)


def test_no_content_has_ended_with_its_head() -> None:
    answer = HttpAnswer()
    assert answer.feed(b"HTTP/1.1 204 No Content\r\n\r\n") == b""
    assert answer.ended


def frame(kind: int, content: bytes) -> bytes:
    return FRAME_HEADER.pack(kind, len(content)) + content


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_cut_anywhere_and_end_with_the_result(size: int) -> None:
    result = {"event": "result", "warnings": []}
    data = frame(FRAME_DATA, b"abc") + frame(FRAME_DATA, b"") + frame(FRAME_EVENT, json.dumps(result).encode())
    frames = FrameSplitter()
    found = [item for at in range(0, len(data), size) for item in frames.feed(data[at : at + size])]
    assert (found, frames.ended) == ([b"abc", b"", result], True)


def test_an_error_comes_behind_what_came_before_it() -> None:
    error = {"event": "error", "error": {"code": "NotFound", "message": "it is gone"}}
    found = list[object]()
    with pytest.raises(NotFound, match="it is gone"):
        found.extend(FrameSplitter().feed(frame(FRAME_DATA, b"abc") + frame(FRAME_EVENT, json.dumps(error).encode())))
    frames = FrameSplitter().feed(frame(FRAME_DATA, b"abc") + frame(FRAME_EVENT, json.dumps(error).encode()))
    assert next(frames) == b"abc"


@pytest.mark.parametrize("head", [FRAME_HEADER.pack(FRAME_DATA, FRAME_MAX_BYTES + 1), FRAME_HEADER.pack(7, 0)])
def test_a_frame_that_is_too_large_or_of_no_kind_is_refused(head: bytes) -> None:
    with pytest.raises(InternalError, match="no part of its API"):
        list(FrameSplitter().feed(head))


def test_lines_are_cut_anywhere() -> None:
    lines = LineSplitter()
    assert [line for byte in b"a\n\nbc\nd" for line in lines.feed(bytes([byte]))] == [b"a", b"", b"bc"]
    assert lines.rest == b"d"


def test_requests() -> None:
    data = request_bytes("GET", "/x", {"a": "1 2", "b": None}, None)
    assert data.startswith(b"GET /v1/x?a=1+2 HTTP/1.1\r\nHost: snapshotd\r\n")
    assert data.endswith(b"\r\n\r\n")
    assert b"Content-Length: 2\r\n\r\n{}" in request_bytes("PUT", "/x", None, {})
    assert b"Content-Length: 0\r\n" in request_bytes("POST", "/x", None, None)
    assert b"Transfer-Encoding: chunked" in begin_bytes("/x", None, "text/plain")
    with pytest.raises(LimitExceeded, match="put large input into files"):
        request_bytes("PUT", "/x", None, "x" * (8 << 20))


def test_keys_follow_from_a_name() -> None:
    def drawn(name: str) -> list[str]:
        with use_keys(name):
            return [new_key(), new_key()]

    assert drawn("a") == drawn("a")
    assert len({*drawn("a"), *drawn("b"), new_key(), new_key()}) == 6


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        (0, "which serves root only; run the command with sudo, or name"),
        (4711, "which serves user 4711 only; run the command as that user, or name"),
        (None, "since a directory on the way to it is closed to that user; run the command as the user who owns it"),
    ],
)
def test_a_socket_of_another_user_is_named_with_whom_it_serves(tmp_path: Path, owner: int | None, said: str) -> None:
    path = tmp_path / "s.sock"
    if owner is not None:
        path.touch()
        os.chown(path, owner, -1)
    error = unreachable(PermissionError(errno.EACCES, "Permission denied"), path)
    assert isinstance(error, NotPermitted)
    assert error.message.startswith(f"user {os.geteuid()} may not use the daemon's socket {path}, {said}")
