"""Images of a registry, without an engine: the manifest and the layers of one image, read over HTTPS as an OCI layout is
read from a folder. `archive_file` chooses the image for this machine and checks every digest.

No password is used: an image that is not for everybody comes through an engine that is logged in. Sources: OCI
distribution specification 1.1; the token authentication of Docker's registry.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import requests

from snapshotd.errors import NotFound, NotPermitted, SandboxFailed, UsageError
from snapshotd.formats.tar_reader import ByteSource
from snapshotd.images.archive_file import MAX_JSON_BYTES
from snapshotd.images.base import innermost_reason
from snapshotd.images.chunks import Chunks

_TIMEOUT_S = (10, 60)
_PIECE_BYTES = 1 << 20
_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.list.v2",
        "docker.distribution.manifest.v2",
    )
)
_HUB, _HUB_REGISTRY = "docker.io", "registry-1.docker.io"
_NAME = re.compile(
    r"(?:(?P<host>[\w.-]+(?::\d+)?)/)?(?P<path>[a-z0-9._/-]+?)(?::(?P<tag>[\w.-]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_BLOB = re.compile(r"blobs/(sha256)/([0-9a-f]{64})")


def is_address(name: str) -> bool:
    """True if a name leads to an image of a registry: it has a tag or a digest. A word alone may be a slip."""
    found = _NAME.fullmatch(name)
    return found is not None and (found["tag"] or found["digest"]) is not None


class RegistryBlobs:
    """The files of one image as an OCI layout has them. Close it after use."""

    def __init__(self, name: str) -> None:
        """`name`: [HOST/]PATH with a tag or a digest, as `docker pull` takes it. UsageError. Connects to nothing."""
        found = _NAME.fullmatch(name)
        host, path = (found["host"] or "", found["path"]) if found else ("", "")
        if host and not ("." in host or ":" in host or host == "localhost"):  # a folder of the usual registry
            host, path = "", f"{host}/{path}"
        if found is None or not (found["tag"] or found["digest"]):
            raise UsageError(f"{name!r} names no image of a registry: that is [HOST/]PATH:TAG, such as debian:12")
        if host in ("", _HUB):
            host, path = _HUB_REGISTRY, path if "/" in path else f"library/{path}"
        own = host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._name, self._wanted = name, found["digest"] or found["tag"]
        self._base = f"{'http' if own else 'https'}://{host}/v2/{path}"
        self._session = requests.Session()
        self._manifests: dict[str, bytes | None] = {}
        """Digest to a manifest, which is not fetched yet where it is None."""
        self._answer: requests.Response | None = None

    def close(self) -> None:
        self._end()
        self._session.close()

    def open(self, name: str) -> tuple[ByteSource, int] | None:
        """NotFound, NotPermitted, SandboxFailed (the registry does not answer as one)."""
        if name == "index.json":
            digest = self._manifest(self._wanted)
            body = json.dumps({"manifests": [{"digest": digest}]}).encode()
            return io.BytesIO(body), len(body)
        blob = _BLOB.fullmatch(name)
        if blob is None:
            return None
        digest = f"{blob[1]}:{blob[2]}"
        if digest in self._manifests:
            known = self._manifests[digest]
            if known is None:
                self._manifest(digest)
                known = self._manifests[digest] or b""
            return io.BytesIO(known), len(known)
        self._end()
        self._answer = self._get(f"{self._base}/blobs/{digest}")
        with self._naming_errors():
            return Chunks(self._pieces(self._answer)), int(self._answer.headers["Content-Length"])

    def _pieces(self, answer: requests.Response) -> Iterator[bytes]:
        with self._naming_errors():
            yield from answer.iter_content(_PIECE_BYTES)

    def _manifest(self, wanted: str) -> str:
        """Fetch a manifest, and return its digest. Everything that it names is a manifest, too."""
        with self._get(f"{self._base}/manifests/{wanted}", _MANIFESTS) as answer:
            body = self._text(answer)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if wanted.startswith("sha256:") and wanted != digest:
            raise UsageError(
                f"the registry's manifest of {self._name} is damaged: it does not have its digest; try again"
            )
        self._manifests[digest] = body
        try:
            listed = json.loads(body).get("manifests", [])
            self._manifests |= {str(one["digest"]): None for one in listed if one["digest"] not in self._manifests}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass  # the reader of the archive says what is malformed
        return digest

    def _get(self, url: str, accept: str = "*/*") -> requests.Response:
        with self._naming_errors():
            answer = self._ask(url, accept)
            if answer.status_code == 401:
                self._log_in(answer.headers.get("WWW-Authenticate", ""))
                answer = self._ask(url, accept)
            if answer.ok:
                return answer
            answer.close()
        if answer.status_code in (401, 403):
            raise NotPermitted(
                f"the registry does not give the image {self._name} to everybody: get it with `docker pull {self._name}`, or "
                "save it and use `snapshotd image import`"
            )
        if answer.status_code == 404:
            raise NotFound(f"the registry has no image {self._name}")
        raise SandboxFailed(
            f"the registry of {self._name} answers with the status {answer.status_code}; try again later"
        )

    def _ask(self, url: str, accept: str) -> requests.Response:
        return self._session.get(
            url, headers={"Accept": accept, "Accept-Encoding": "identity"}, stream=True, timeout=_TIMEOUT_S
        )

    def _log_in(self, challenge: str) -> None:
        """Get a token that the registry gives to everybody."""
        asked = dict(_PARAMETER.findall(challenge))
        realm = asked.pop("realm", "")
        if not challenge.lower().startswith("bearer ") or urlsplit(realm).scheme not in (
            "https",
            urlsplit(self._base).scheme,
        ):
            return
        with self._session.get(realm, params=asked, timeout=_TIMEOUT_S, stream=True) as answer:
            document: Any = json.loads(self._text(answer)) if answer.ok else {}
        token = document.get("token") or document.get("access_token") if isinstance(document, dict) else None
        if isinstance(token, str):
            self._session.headers["Authorization"] = f"Bearer {token}"

    def _text(self, answer: requests.Response) -> bytes:
        return Chunks(self._pieces(answer)).read_all(MAX_JSON_BYTES)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except (requests.RequestException, OSError, ValueError, KeyError) as exc:
            raise SandboxFailed(f"the registry of {self._name} cannot be read: {innermost_reason(exc)}") from exc

    def _end(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
