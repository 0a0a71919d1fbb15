"""Announces events to a URL of the operator's choice, in the background: no call ever waits for it, and failed
deliveries are logged.

Each is one POST of a JSON object. With a secret, the header `X-Snapshotd-Signature: sha256=HEX` holds the HMAC-SHA256
of the body.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import queue
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from snapshotd.engine.journal.approval.policy import Webhook

MAX_QUEUED = 1000
TRIES = 5
FIRST_RETRY_S = 1.0
"""Twice as long before each further try."""
TIMEOUT_S = 10.0
_CLOSE_S = 2 * TIMEOUT_S
_log = logging.getLogger(__name__)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Sends the body to the named host only, and to no host that it redirects to."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhooks:
    """Delivers one after the other. Thread-safe. The thread is started with the first event."""

    def __init__(self, first_retry_s: float = FIRST_RETRY_S) -> None:
        self._first_retry_s = first_retry_s
        self._queue: queue.Queue[tuple[Webhook, bytes] | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._opener = urllib.request.build_opener(_NoRedirects())

    def send(self, webhook: Webhook, event: dict[str, Any]) -> None:
        """Have an event delivered. Never blocks; an event that does not fit into the queue is dropped and logged."""
        with self._lock:
            if self._closing.is_set():
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait((webhook, json.dumps(event, separators=(",", ":")).encode()))
        except queue.Full:
            _log.error("an event was not announced: %d wait for the webhook already", MAX_QUEUED)

    def close(self) -> None:
        """Give up the waiting events. Idempotent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                pass  # it looks at `_closing` after each item
            thread.join(_CLOSE_S)

    def _work(self) -> None:
        while not self._closing.is_set() and (item := self._queue.get()) is not None:
            self._deliver(*item)

    def _deliver(self, webhook: Webhook, body: bytes) -> None:
        reason = ""
        for attempt in range(TRIES):
            if self._closing.wait(self._first_retry_s * 2 ** (attempt - 1) if attempt else 0):
                return
            reason = self._post(webhook, body)
            if not reason:
                return
        _log.error("the webhook did not take an event in %d tries: %s", TRIES, reason)

    def _post(self, webhook: Webhook, body: bytes) -> str:
        """Post the body once. Returns "" if it was taken, else the reason, which never holds the URL: a token may be in it."""
        headers = {"Content-Type": "application/json", "User-Agent": "snapshotd"}
        if webhook.secret is not None:
            headers["X-Snapshotd-Signature"] = (
                "sha256=" + hmac.new(webhook.secret.encode(), body, hashlib.sha256).hexdigest()
            )
        request = urllib.request.Request(webhook.url, data=body, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as exc:
            exc.close()
            return f"it answers {exc.code}"
        except (OSError, HTTPException, ValueError) as exc:
            return type(exc).__name__
