"""A registry of one image: the files of an OCI layout over HTTP, for those who have asked for a token."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class TinyRegistry(ThreadingHTTPServer):
    """`layout`: file name to content, which a test may change. `asked`: the paths of all requests so far."""

    daemon_threads = True

    def __init__(self, layout: dict[str, bytes | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.layout = layout
        self.asked: list[str] = []
        self.token = "for-all"
        self.cut = False
        """Whether it hangs up in the middle of a layer."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def registry(layout: dict[str, bytes | None]) -> Iterator[TinyRegistry]:
    with TinyRegistry(layout) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: TinyRegistry

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.asked.append(path)
        if path == "/token":
            assert query == "service=tiny&scope=repository%3Atest%2Fapp%3Apull"
            self._answer(200, json.dumps({"token": self.server.token}).encode())
        elif self.headers["Authorization"] != "Bearer for-all":
            realm = f'Bearer realm="http://{self.server.address}/token",service="tiny",scope="repository:test/app:pull"'
            self._answer(401, b"{}", {"WWW-Authenticate": realm})
        else:
            self._answer_file(path.removeprefix("/v2/test/app/"))

    def _answer_file(self, path: str) -> None:
        kind, _, reference = path.partition("/")
        layout, name = self.server.layout, f"blobs/{reference.replace(':', '/')}"
        if kind == "manifests" and reference == "1":
            name = "index.json"
        elif kind == "manifests":
            assert "image.manifest.v1+json" in self.headers["Accept"]
        data = layout.get(name)
        if data is None:
            self._answer(404, b"{}")
        else:
            self._answer(200, data, cut=self.server.cut and len(data) > 2000)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *_: object) -> None:
        pass
