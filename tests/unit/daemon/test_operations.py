"""The table of operations is all that the API has, and what each handler takes and gives."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from snapshotd import types as t
from snapshotd.api.operation import Operation
from snapshotd.api.operations import OPERATIONS
from snapshotd.api.record import decode, encode, encode_masked
from snapshotd.api.snapshots import CallStatus, ChangeInfo, SnapshotInfo
from snapshotd.api.trajectories import CreateRequest, Provider
from snapshotd.api.wire import API_PREFIX
from snapshotd.daemon.http.api import openapi
from snapshotd.daemon.http.routes.shared import ROUTES, Named
from snapshotd.engine import base

HANDLERS: dict[tuple[str, str], Any] = {
    (method, route.path.removeprefix(API_PREFIX)): route.endpoint for route in ROUTES for method in route.methods
}


def test_each_operation_has_one_handler_and_each_handler_an_operation() -> None:
    rows = [(row.method, row.path) for row in OPERATIONS.values()]
    assert len(rows) == len(set(rows)) == len(ROUTES)
    assert set(rows) == set(HANDLERS)
    described = openapi()["paths"]
    assert {(row.method.lower(), API_PREFIX + row.path.replace(":path", "")) for row in OPERATIONS.values()} == {
        (method, path) for path, methods in described.items() for method in methods
    }


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=list(OPERATIONS))
def test_a_handler_takes_what_its_operation_says(row: Operation[Any]) -> None:
    hints = get_type_hints(HANDLERS[row.method, row.path])
    assert hints.get("body") == (None if row.is_upload else row.body)
    assert ("named" in hints) is (row.once and row.name != "ask"), "a question has its call as its key"
    assert hints.get("named", Named) is Named


def test_a_caller_that_only_reads_changes_nothing() -> None:
    reading = {row.name: row for row in OPERATIONS.values() if row.scope == "read" and row.method != "GET"}
    assert set(reading) == {"compare", "flush", "search_values"}
    assert not any(row.once for row in reading.values())


@pytest.mark.parametrize(
    ("named", "texts"),
    [
        (CallStatus, list(t.CallStatus)),
        (get_type_hints(SnapshotInfo, include_extras=True)["state"], list(t.SnapshotState)),
    ],
)
def test_the_texts_of_an_answer_are_those_of_the_engine(named: Any, texts: list[str]) -> None:
    assert named.__metadata__[0].texts == texts


def test_a_path_keeps_every_byte() -> None:
    for path, wire in ((b"a/b", {"path": "a/b"}), (b"a\xff", {"path": "a\ufffd", "path_b64": "Yf8="})):
        change = ChangeInfo("added", "/" + path.decode(errors="surrogateescape"), None, None)
        said = json.loads(json.dumps(change, default=encode))
        assert said == {"change": "added", **wire, "before": None, "after": None}
        assert decode(ChangeInfo, said) == change


def test_requests_hide_their_secrets_from_digests_and_logs() -> None:
    body = CreateRequest(secrets={"A": "hidden"}, providers=(Provider("openai", api_key="hidden"),))
    assert "hidden" not in repr(body)
    assert "hidden" not in json.dumps(body, default=encode_masked)
    assert json.dumps(body, default=encode).count("hidden") == 2


def test_no_secret_is_in_the_text_of_a_request() -> None:
    """Errors and logs show requests of the engine, too."""
    secret = "xK7-a-value"
    assert secret not in repr(base.Variant("a", secrets=(("KEY", secret),)))
