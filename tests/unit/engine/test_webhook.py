"""Events on their way to outside tools: by webhook, signed and tried again, and to who watches."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest

from snapshotd.engine import watch
from snapshotd.engine.journal.approval import webhook
from snapshotd.engine.journal.approval.policy import Webhook
from snapshotd.engine.journal.approval.webhook import Webhooks
from snapshotd.engine.watch import Watch

WAIT_S = 30.0


class Receiver:
    """A server that answers with the codes it is told to, then 204."""

    def __init__(self) -> None:
        self.got: Queue[tuple[dict[str, str], bytes]] = Queue()
        self.codes: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                # Before the answer, after which the next request may come, in another thread.
                receiver.got.put(
                    ({key.lower(): value for key, value in self.headers.items()} | {"path": self.path}, body)
                )
                self.send_response(receiver.codes.pop(0) if receiver.codes else 204)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=t0ken"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def webhooks() -> Iterator[Webhooks]:
    made = Webhooks(first_retry_s=0.001)
    yield made
    made.close()
    assert not any(thread.name == "webhook" for thread in threading.enumerate())


def test_an_event_is_posted_and_signed(receiver: Receiver, webhooks: Webhooks) -> None:
    webhooks.send(Webhook(receiver.url, "secret"), {"event": "approval", "id": "1"})
    headers, body = receiver.got.get(timeout=WAIT_S)
    assert json.loads(body) == {"event": "approval", "id": "1"}
    assert headers["content-type"] == "application/json"
    assert headers["x-snapshotd-signature"] == "sha256=" + hmac.new(b"secret", body, hashlib.sha256).hexdigest()
    webhooks.send(Webhook(receiver.url), {"event": "approval", "id": "2"})
    headers, _ = receiver.got.get(timeout=WAIT_S)
    assert "x-snapshotd-signature" not in headers


def test_it_is_tried_again_in_order(receiver: Receiver, webhooks: Webhooks) -> None:
    receiver.codes = [500, 503, 204, 204]
    for number in (1, 2):
        webhooks.send(Webhook(receiver.url), {"number": number})
    assert [json.loads(receiver.got.get(timeout=WAIT_S)[1])["number"] for _ in range(4)] == [1, 1, 1, 2]


def test_a_redirect_is_not_followed_and_giving_up_is_logged_without_the_url(
    receiver: Receiver, webhooks: Webhooks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    receiver.codes = [302] * webhook.TRIES
    webhooks.send(Webhook(receiver.url), {"number": 1})
    webhooks.send(Webhook(receiver.url), {"number": 2})
    paths = [receiver.got.get(timeout=WAIT_S)[0]["path"] for _ in range(webhook.TRIES + 1)]
    assert set(paths) == {"/hook?token=t0ken"}
    assert "it answers 302" in caplog.text
    assert "t0ken" not in caplog.text


def test_nobody_waits_for_a_receiver_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    webhooks = Webhooks(first_retry_s=3600)
    for number in range(webhook.MAX_QUEUED + 10):
        webhooks.send(Webhook("http://127.0.0.1:1/"), {"number": number})
    webhooks.close()
    assert "was not announced" in caplog.text
    webhooks.send(Webhook("http://127.0.0.1:1/"), {})
    assert not any(thread.name == "webhook" for thread in threading.enumerate())


def test_who_watches_gets_what_comes_from_then_on() -> None:
    hub = Watch()
    hub.publish({"n": 0})
    first, second = hub.follow(), hub.follow()
    for n in (1, 2):
        hub.publish({"n": n})
    assert [next(first), next(first), next(second)] == [{"n": 1}, {"n": 2}, {"n": 1}]
    second.close()  # type: ignore[attr-defined]
    hub.publish({"n": 3})
    hub.close()
    assert list(first) == [{"n": 3}]


def test_who_is_slow_loses_the_oldest_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_WAITING", 3)
    hub = Watch()
    watching = hub.follow()
    for n in range(5):
        hub.publish({"n": n})
    hub.close()
    assert list(watching) == [{"event": "lost", "count": 2}, {"n": 2}, {"n": 3}, {"n": 4}]
