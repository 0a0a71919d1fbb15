"""Values as objects of a bucket of an S3-compatible service (extra `s3`).

Needs conditional writes (`If-None-Match: *` on PutObject; Amazon S3 since 2024, MinIO, Ceph, R2): without them two
writers could replace each other's value. The store tests this once, before its first put, on the object `<prefix>PROBE`
(upper case is in no key). Every put carries its SHA-256 and MD5, which the service checks; its answers are compared
with them.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

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
from snapshotd.store.base import Store
from snapshotd.store.keys import check_range, check_store_key, is_key

_PROBE = "PROBE"
_MISSING = ("NoSuchKey", "404")
_TAKEN = ("PreconditionFailed", "412")
_RACING = ("ConditionalRequestConflict", "409")
_FORBIDDEN = ("AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "ExpiredToken")
_SKEWED = ("RequestTimeTooSkewed",)
_FULL = ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507")
_CUT = ("XAmzContentSHA256Mismatch", "BadDigest", "IncompleteBody", "InvalidDigest")
_TRIES = 4
"""Number of tries for operations that botocore does not repeat by itself (a body that breaks off, a race of two
conditional puts)."""


class S3Store(Store):
    """Credentials come from where boto3 looks for them (environment, profile, instance role)."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        attempts: int = 5,
        timeout_s: float = 60.0,
        page_keys: int = 1000,
    ) -> None:
        """Keys are the objects `<prefix>/<key>` of `bucket`, which must exist. `attempts` counts the first one;
        `timeout_s` is for each connection and each wait for data. Errors: Unsupported (boto3 is missing), NotFound (no
        such bucket), NotPermitted, OSError."""
        self._boto3, self._config, self._errors = _library()
        self.bucket, self.prefix = bucket, prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._name = f"s3://{bucket}/{self.prefix}"
        self._service = endpoint or "S3"
        self._page_keys = page_keys
        self._lock = threading.Lock()
        self._conditional = False
        config = self._config.Config(
            connect_timeout=min(timeout_s, 10.0),
            read_timeout=timeout_s,
            retries={"total_max_attempts": attempts, "mode": "standard"},
            max_pool_connections=32,
        )
        session = self._boto3.session.Session()
        try:
            self._client: Any = self._ask(
                "opening", lambda: session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
            )
        except ValueError as exc:
            raise UsageError(
                f"{self._service!r} is not the address of a service ({exc}); use http://host:port or https://host"
            ) from exc
        self._ask("opening", lambda: self._client.head_bucket(Bucket=bucket), bucket_only=True)

    def close(self) -> None:
        self._client.close()

    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        check_store_key(key)
        body = b"".join(parts)
        self._need_conditional_writes()
        if not self._put_new(key, body) and self.get(key) != body:
            raise Conflict(f"there is another value under {key} in {self._name}; values never change, use a new key")

    def _need_conditional_writes(self) -> None:
        """Unsupported unless a conditional put over an existing object is refused."""
        with self._lock:
            if self._conditional:
                return
            if self._put_new(_PROBE, b"") and self._put_new(_PROBE, b""):
                raise Unsupported(
                    f"{self._service} ignores conditional writes, which {self._name} needs; use a service that has them"
                )
            self._conditional = True

    def _put_new(self, key: str, body: bytes) -> bool:
        """Put unless the key is taken (False then). The answer was checked against the sent body."""
        sha256 = base64.b64encode(hashlib.sha256(body).digest()).decode()
        md5 = hashlib.md5(body, usedforsecurity=False)
        sent = {
            "Body": body,
            "IfNoneMatch": "*",
            "ChecksumSHA256": sha256,
            "ContentMD5": base64.b64encode(md5.digest()).decode(),
        }
        for left in reversed(range(_TRIES)):
            try:
                answer = self._ask(f"putting {key}", lambda: self._client.put_object(**self._object(key), **sent), key)
            except _TakenError:
                return False
            except _RacingError as exc:
                if not left:
                    raise ServiceAwayError(
                        f"{self._service} did not settle who may write {key} of {self._name}; try again later"
                    ) from exc
                time.sleep(
                    0.1 * 2 ** (_TRIES - left)
                )  # the service asks for it; nothing tells when the other put is over
                continue
            self._check_stored(key, body, answer, sha256, md5.hexdigest())
            return True
        raise AssertionError("the last try returns or raises")

    def _check_stored(self, key: str, body: bytes, answer: dict[str, Any], sha256: str, md5: str) -> None:
        """DataLoss unless the service says that it has these bytes. Its word is the SHA-256, or the MD5 as ETag (an
        ETag is none when the object is encrypted with a key of a key service); failing both, the value is read back."""
        etag = str(answer.get("ETag", "")).strip('"')
        if answer.get("ChecksumSHA256") == sha256 or (not answer.get("ChecksumSHA256") and etag == md5):
            return
        if answer.get("ChecksumSHA256") or self.get(key) != body:
            raise DataLoss(
                f"{self._service} stored other bytes than were sent for {key} of {self._name}; do not trust this service"
            )

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        check_store_key(key)
        check_range(offset, length)
        if length == 0:
            self.size_bytes(key)  # NotFound
            return b""
        whole = offset == 0 and length is None
        span = {} if whole else {"Range": f"bytes={offset}-{'' if length is None else offset + length - 1}"}
        for left in reversed(range(_TRIES)):
            try:
                return bytes(self._ask(f"reading {key}", lambda: self._read(key, offset, length, span), key))
            except _PastEndError:
                return b""
            except _BrokenOffError as exc:
                if not left:
                    raise ServiceAwayError(
                        f"{self._service} broke off while sending {key} of {self._name}; check the connection"
                    ) from exc
        raise AssertionError("the last try returns or raises")

    def _read(self, key: str, offset: int, length: int | None, span: dict[str, str]) -> bytes:
        answer = self._client.get_object(**self._object(key), ChecksumMode="ENABLED", **span)
        try:
            with answer["Body"] as stream:
                data = bytes(stream.read())
        except (
            self._errors.IncompleteReadError,
            self._errors.ResponseStreamingError,
            self._errors.ReadTimeoutError,
        ) as exc:
            raise _BrokenOffError from exc
        if len(data) != answer["ContentLength"]:
            raise _BrokenOffError
        if not span:
            return data
        if answer["ResponseMetadata"]["HTTPStatusCode"] != 206:  # a service may send all of it instead
            return data[offset : None if length is None else offset + length]
        first, _, total = str(answer.get("ContentRange", "")).removeprefix("bytes ").partition("/")
        left = int(total) - offset if total.isdecimal() else -1
        if first.partition("-")[0] != str(offset) or len(data) != (left if length is None else min(length, left)):
            raise DataLoss(
                f"{self._service} sent another range of {key} of {self._name} than was asked for; do not trust this service"
            )
        return data

    def size_bytes(self, key: str) -> int:
        check_store_key(key)
        answer = self._ask(f"looking at {key}", lambda: self._client.head_object(**self._object(key)), key)
        return int(answer["ContentLength"])

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Ask once for each page of 1,000 keys. A page that cannot be had, or is out of order, is an error."""
        last, token = "", None
        while True:
            asked: dict[str, Any] = {"Bucket": self.bucket, "Prefix": self.prefix + prefix, "MaxKeys": self._page_keys}
            page = self._ask(
                "listing",
                partial(self._client.list_objects_v2, **asked, **({"ContinuationToken": token} if token else {})),
            )
            for entry in page.get("Contents", ()):
                key = str(entry["Key"]).removeprefix(self.prefix)
                if is_key(key):
                    if key <= last:
                        raise OSError(
                            f"{self._service} lists {self._name} out of order ({key} after {last}); use another service"
                        )
                    last = key
                    yield key
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token:
                raise OSError(
                    f"{self._service} cut the list of {self._name} off after {last!r} without a way to go on; try again"
                )

    def delete(self, key: str) -> None:
        check_store_key(key)
        try:
            self._ask(f"deleting {key}", lambda: self._client.delete_object(**self._object(key)), key)
        except NotFound:
            self._ask("looking at the bucket", lambda: self._client.head_bucket(Bucket=self.bucket), bucket_only=True)

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + key}

    def _ask(self, doing: str, request: Callable[[], Any], key: str | None = None, *, bucket_only: bool = False) -> Any:
        """Run one request; every failure of the library becomes one of ours, with the service's name in it."""
        errors = self._errors
        try:
            return request()
        except errors.ClientError as exc:
            raise self._failure(doing, exc.response, key, bucket_only=bucket_only) from exc
        except (
            errors.NoCredentialsError,
            errors.PartialCredentialsError,
            errors.NoRegionError,
            errors.ProfileNotFound,
        ) as exc:
            raise NotPermitted(
                f"{self._name} cannot be used: {exc}; set the credentials as for the AWS command line"
            ) from exc
        except errors.FlexibleChecksumError as exc:
            raise DataLoss(
                f"{key} of {self._name} does not match the checksum it was stored with ({exc}); run `snapshotd check`"
            ) from exc
        except errors.BotoCoreError as exc:
            raise ServiceAwayError(
                f"{doing} failed: {self._service} cannot be used for {self._name} ({exc}); check address and network"
            ) from exc

    def _failure(self, doing: str, response: dict[str, Any], key: str | None, *, bucket_only: bool) -> Exception:
        code = str(response.get("Error", {}).get("Code", ""))
        text = str(response.get("Error", {}).get("Message", ""))
        status = str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        if code == "NoSuchBucket" or (bucket_only and code in _MISSING):
            return NotFound(f"there is no bucket {self.bucket} at {self._service}; create it or name another one")
        table: tuple[tuple[tuple[str, ...], Callable[[], Exception]], ...] = (
            (_MISSING, lambda: NotFound(f"there is no value under {key} in {self._name}")),
            (_TAKEN, _TakenError),
            (_RACING, _RacingError),
            (("InvalidRange", "416"), _PastEndError),
            (
                _FORBIDDEN,
                lambda: NotPermitted(
                    f"{doing} in {self._name} was refused ({code}); check the credentials and their rights"
                ),
            ),
            (
                _SKEWED,
                lambda: NotPermitted(
                    f"{doing} in {self._name} was refused ({code}); set this machine's clock, which is off by minutes"
                ),
            ),
            (
                _FULL,
                lambda: OutOfSpace(
                    f"{self._service} has no space left for {self._name} ({code}); free some and try again"
                ),
            ),
            (
                _CUT,
                lambda: OSError(
                    f"{doing} in {self._name} failed: {self._service} got other bytes than were sent ({code}); try again"
                ),
            ),
            (
                ("NotImplemented", "501"),
                lambda: Unsupported(f"{self._service} cannot do what {self._name} needs ({doing}: {text})"),
            ),
        )
        for codes, make in table:
            if code in codes or (not code and status in codes):
                return make()
        return ServiceAwayError(
            f"{doing} in {self._name} failed: {self._service} answered {code or status} {text}; try again later"
        )


class _TakenError(Exception):
    """The key has a value."""


class _RacingError(Exception):
    """Another process is putting the same key at this moment."""


class _PastEndError(Exception):
    """The value ends before the range."""


class _BrokenOffError(Exception):
    """The connection ended in the middle of a value."""


def _library() -> tuple[ModuleType, ModuleType, ModuleType]:
    """boto3, botocore.config and botocore.exceptions; here and not at the top because few need the extra.
    Unsupported."""
    try:
        import boto3.session
        import botocore.config
        import botocore.exceptions
    except ImportError as exc:
        raise Unsupported("stores in S3 need the package boto3, which is missing; pip install 'snapshotd[s3]'") from exc
    return boto3, botocore.config, botocore.exceptions
