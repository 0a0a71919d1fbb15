"""What only holds for stores in S3, and the addresses of stores."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.response import StreamingBody

from snapshotd.errors import (
    Conflict,
    DataLoss,
    NotFound,
    NotPermitted,
    OutOfSpace,
    ServiceAwayError,
    Unsupported,
    UsageError,
)
from snapshotd.store.memory import MemoryStore
from snapshotd.store.open import open_store
from snapshotd.store.s3 import S3Store
from tests import s3_service


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with s3_service.running() as endpoint:
        yield endpoint


@pytest.fixture
def new_bucket(s3_endpoint: str) -> Callable[[], str]:
    return lambda: s3_service.make_bucket(s3_endpoint)


@pytest.fixture(scope="module")
def bucket(s3_endpoint: str) -> str:
    """Where each test has a prefix of its own."""
    return s3_service.make_bucket(s3_endpoint)


@pytest.fixture
def store(s3_endpoint: str, bucket: str) -> Iterator[S3Store]:
    opened = S3Store(bucket, f"packs-here-{os.urandom(6).hex()}", endpoint=s3_endpoint, attempts=2, timeout_s=10)
    yield opened
    opened.close()


HANDLERS: list[object] = []
"""The library keeps weak references."""


def on(store: S3Store, event: str, action: Callable[..., None]) -> None:
    """Change what goes to the service or comes from it, between the library and the wire."""

    def handler(**values: Any) -> None:  # what a handler returns would take the place of the service's answer
        action(**values)

    store._client.meta.events.register(event, handler)
    HANDLERS.append(handler)


def test_a_service_without_conditional_writes_is_refused(store: S3Store) -> None:
    on(store, "before-call.s3.PutObject", lambda params, **_: params["headers"].pop("If-None-Match"))
    for _ in range(2):
        with pytest.raises(Unsupported, match="conditional writes"):
            store.put("a", [b"x"])
    assert list(store.keys()) == []


@pytest.mark.long  # moto without the condition: above
def test_rclone_is_refused_because_it_has_no_conditional_writes() -> None:
    with s3_service.running(service="rclone") as endpoint:
        opened = S3Store(s3_service.make_bucket(endpoint), endpoint=endpoint)
        with closing(opened), pytest.raises(Unsupported, match="ignores conditional writes"):
            opened.put("a", [b"x"])
        assert list(opened.keys()) == []


def test_other_bytes_than_were_sent_are_found(store: S3Store) -> None:
    store.put("first", [b"good"])

    def spoil(parsed: dict[str, Any], **_: object) -> None:
        parsed["ETag"] = '"0123"'
        parsed["ChecksumSHA256"] = "AAAA"

    on(store, "after-call.s3.PutObject", spoil)
    with pytest.raises(DataLoss, match="stored other bytes"):
        store.put("second", [b"good"])


def test_a_service_that_tells_no_checksum_is_read_back(store: S3Store) -> None:
    store.put("first", [b"good"])
    on(store, "after-call.s3.PutObject", lambda parsed, **_: parsed.update(ETag='"0123"', ChecksumSHA256=""))
    store.put("second", [b"good"])
    assert store.get("second") == b"good"


@pytest.mark.parametrize("cut", [1, 3, 100])
def test_a_body_that_breaks_off_is_asked_for_again(store: S3Store, cut: int) -> None:
    """Up to three times; then it is an error."""
    value = b"value " * 1000
    store.put("a", [value])
    times = 0

    def break_off(parsed: dict[str, Any], **_: object) -> None:
        nonlocal times
        times += 1
        if times <= cut and "Body" in parsed:
            parsed["Body"] = StreamingBody(io.BytesIO(value[:500]), len(value))

    on(store, "after-call.s3.GetObject", break_off)
    for length in (None, len(value)):
        times = 0
        if cut <= 3:
            assert store.get("a", 0, length) == value
            assert times == cut + 1
        else:
            with pytest.raises(OSError, match="broke off"):
                store.get("a", 0, length)


def test_a_service_that_ignores_ranges_is_coped_with(store: S3Store) -> None:
    store.put("a", [b"0123456789"])
    on(store, "before-call.s3.GetObject", lambda params, **_: params["headers"].pop("Range", None))
    assert store.get("a", 3, 4) == b"3456"
    assert store.get("a", 8) == b"89"
    assert store.get("a", 8, 100) == b"89"
    assert store.get("a", 10, 5) == b""


def test_a_wrong_range_is_found(store: S3Store) -> None:
    store.put("a", [b"0123456789"])
    on(store, "before-call.s3.GetObject", lambda params, **_: params["headers"].update(Range="bytes=2-5"))
    with pytest.raises(DataLoss, match="another range"):
        store.get("a", 3, 4)


def test_a_lost_answer_is_success_at_the_next_try(store: S3Store) -> None:
    store.put("first", [b"x"])
    lost: list[int] = []

    def lose(response_dict: dict[str, Any], **_: object) -> None:
        if not lost:
            lost.append(response_dict["status_code"])
            response_dict["status_code"] = 503

    on(store, "before-parse.s3.PutObject", lose)
    store.put("a", [b"value"])
    assert lost == [200]
    assert store.get("a") == b"value"
    with pytest.raises(Conflict):
        store.put("a", [b"other"])


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (403, "AccessDenied", NotPermitted),
        (403, "RequestTimeTooSkewed", NotPermitted),
        (507, "XMinioStorageFull", OutOfSpace),
        (400, "BadDigest", OSError),
        (500, "InternalError", OSError),
        (501, "NotImplemented", Unsupported),
        (503, "SlowDown", ServiceAwayError),
        (409, "ConditionalRequestConflict", OSError),
    ],
)
def test_each_answer_is_the_right_error(store: S3Store, status: int, code: str, error: type[Exception]) -> None:
    store.put("first", [b"x"])
    body = f"<Error><Code>{code}</Code><Message>said so</Message></Error>".encode()
    on(
        store,
        "before-parse.s3.PutObject",
        lambda response_dict, **_: response_dict.update(status_code=status, body=body),
    )
    with pytest.raises(error, match="packs-here"):
        store.put("a", [b"value"])


def test_a_list_that_ends_too_early_is_an_error(store: S3Store) -> None:
    store._page_keys = 2
    for key in ("a", "b", "c"):
        store.put(key, [b"x"])
    on(store, "after-call.s3.ListObjectsV2", lambda parsed, **_: parsed.pop("NextContinuationToken", None))
    listed = store.keys()
    with pytest.raises(OSError, match="cut the list"):
        list(listed)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    with pytest.raises(Unsupported, match=r"snapshotd\[s3\]"):
        open_store("s3://bucket/prefix")


def test_two_prefixes_of_a_bucket_do_not_meet(s3_endpoint: str, new_bucket: Callable[[], str]) -> None:
    bucket = new_bucket()
    one, two, root = (S3Store(bucket, prefix, endpoint=s3_endpoint) for prefix in ("one", "one-two", ""))
    one.put("a", [b"1"])
    two.put("a", [b"2"])
    assert list(one.keys()) == list(two.keys()) == ["a"]
    assert (one.get("a"), two.get("a"), root.get("one/a")) == (b"1", b"2", b"1")
    assert list(root.keys()) == ["one-two/a", "one/a"]


def test_a_missing_bucket_is_not_found(s3_endpoint: str) -> None:
    with pytest.raises(NotFound, match="no bucket nowhere"):
        S3Store("nowhere", endpoint=s3_endpoint)


def test_a_bucket_that_goes_away_is_named(s3_endpoint: str, new_bucket: Callable[[], str]) -> None:
    bucket = new_bucket()
    store = S3Store(bucket, endpoint=s3_endpoint)
    boto3.client("s3", endpoint_url=s3_endpoint).delete_bucket(Bucket=bucket)
    for call in (
        lambda: store.put("a", [b"x"]),
        lambda: store.get("a"),
        lambda: list(store.keys()),
        lambda: store.delete("a"),
    ):
        with pytest.raises(NotFound, match=f"no bucket {bucket}"):
            call()


def test_no_service_is_an_error_that_names_it(s3_endpoint: str, new_bucket: Callable[[], str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServiceAwayError, match=endpoint):
            S3Store("some", endpoint=endpoint, attempts=2, timeout_s=2)


def test_a_service_that_never_answers_is_given_up(s3_endpoint: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ServiceAwayError, match=endpoint):
            S3Store("some", endpoint=endpoint, attempts=2, timeout_s=0.5)
        assert time.monotonic() - began < 60, "a minute is what the library waits by itself, and twice"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nothing",
        "/path",
        "file:relative",
        "file://host/path",
        "file:///a?b=c",
        "file:///a#b",
        "http://x/y",
        "s3://",
        "s3:///prefix",
        "s3://Bucket/x",
        "s3://b/x?endpoint=",
        "s3://b/x?endpoint=ftp://h",
        "s3://b/x?endpoint=host:9000",
        "s3://b/x?other=1",
        "s3://b/x?region=a&region=b",
        "s3://b/a//b",
        "s3://b/%2e%2e/x",
        "s3://b/x#y",
        "memory:x",
        "memory://",
        "s3://[/x",
        "file:///a%00b",
    ],
)
def test_wrong_addresses_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"file:///path, s3://bucket"):
        open_store(url)


def test_addresses_open_what_they_name(tmp_path: Path, s3_endpoint: str, new_bucket: Callable[[], str]) -> None:
    local = open_store(f"file://{tmp_path}/a%20b")
    local.put("x", [b"1"])
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    bucket = new_bucket()
    remote = open_store(f"s3://{bucket}/some/prefix?endpoint={s3_endpoint}&region=eu-central-1")
    remote.put("x", [b"2"])
    assert S3Store(bucket, "some", endpoint=s3_endpoint).get("prefix/x") == b"2"
    assert isinstance(open_store("memory:"), MemoryStore)
    for store in (local, remote):
        store.close()
