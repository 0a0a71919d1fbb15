"""What a browser sends to the page's server."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator

from snapshotd.page.server import PAGE_KEY, PageServer

AWAY = 503
"""The status of what is passed on here: there is no daemon."""


class Browser:
    """What a browser sends to the page's server."""

    def __init__(self, server: PageServer) -> None:
        self.port, self.cookie, self.key = server.port, "", ""
        self.token = server.address().partition("token=")[2]
        self.host = f"127.0.0.1:{server.port}"
        self.page = {"Host": self.host, "Origin": f"http://{self.host}", "Sec-Fetch-Site": "same-origin"}

    def ask(self, method: str, path: str, body: str | None = None, **headers: str) -> http.client.HTTPResponse:
        """`headers` with _ for -; an empty one is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {
            **self.page,
            "Cookie": self.cookie,
            PAGE_KEY: self.key,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        connection.putrequest(method, path, skip_host=True)
        for name, value in sent.items():
            if value:
                connection.putheader(name, value)
        data = (body or "").encode()
        if method != "GET":
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        answer = connection.getresponse()
        answer.text = answer.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return answer

    def sign_in(self, token: str | None = None) -> http.client.HTTPResponse:
        answer = self.ask("POST", "/session", json.dumps({"token": self.token if token is None else token}))
        cookie = answer.headers["set-cookie"] or ""
        self.cookie = cookie.partition(";")[0] or self.cookie
        if answer.status == 200:
            self.key = json.loads(answer.text)["key"]  # type: ignore[attr-defined]
        return answer


@contextlib.contextmanager
def serving(server: PageServer) -> Iterator[Browser]:
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Browser(server)
    finally:
        server.stop()
        thread.join()
