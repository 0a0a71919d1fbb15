"""The digests by which a request is known again after an update: of an experiment's description, and of a request under a
key. Those of fields that are left out would change with each new field. The earlier ones were recorded at the version
before fields with their defaults were left out."""

from __future__ import annotations

import base64
import io
import tarfile
from dataclasses import dataclass, replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from snapshotd.api.experiments import ExperimentRequest
from snapshotd.api.record import encode_given, record
from snapshotd.api.trajectories import CreateRequest
from snapshotd.daemon.http.decoding import experiment_request
from snapshotd.daemon.http.routes.shared import Named
from snapshotd.engine.experiments.base import Scorer
from snapshotd.engine.experiments.service import _digests, _encode_given

SNAPSHOT = "0123456789abcdef" * 2
SANDBOX = {
    "image": "python",
    "workspace": "/home/someone/project",
    "env": {"B": "1", "A": "2"},
    "limits": {"memory_bytes": 1 << 30},
    "secrets": {"TOKEN": "t1"},
    "providers": [{"kind": "openai", "api_key": "sk-1"}],
}


def body(source: Any, **more: Any) -> ExperimentRequest:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        item = tarfile.TarInfo("test.py")
        item.size, item.mode = 3, 0o644
        tar.addfile(item, io.BytesIO(b"abc"))
    cold = {"label": "cold", "env": {"WAY": "cold"}, "secrets": {"KEY": "k1"}, "network": "allow:pypi.org"}
    edit = {"messages": [{"role": "user", "content": "hi"}]}
    said = {
        "name": "parser",
        "source": source,
        "args": ["./agent"],
        "repeat": 2,
        "protected": ["/workspace/tests"],
        "budget": {"calls": 100},
        "variants": [cold, {"label": "warm", "model": "small", "limits": {"cpus": 1}, "edit": edit}],
        "score": {"argv": ["pytest"], "junit": "/tmp/r.xml", "files_b64": base64.b64encode(data.getvalue()).decode()},
        **more,
    }
    return TypeAdapter(ExperimentRequest).validate_python(said)


@pytest.mark.parametrize(
    ("source", "digests"),
    [
        (
            SNAPSHOT,
            (
                "9dd3e86eebc896ab1b7fef8387a36a67121005fbc37fc5892f608ab560eab634",
                "6c54d60ceeb0c52a0b1a96fa9b25163a1e3e0d0ba7bc938c404a629fc73d6f75",
            ),
        ),
        (
            SANDBOX,
            (
                "5c5a1ae82bf496a8109a3d590afc887f7eaf1c797e59c7b26fbadbad14481fe2",
                "e123f1027c0793c5c594098da6f9044ea1ba29c16795ab0ab936be3d23d22256",
            ),
        ),
    ],
)
def test_a_description_has_the_digests_of_this_version_and_of_the_one_before(
    source: Any, digests: tuple[str, ...]
) -> None:
    assert _digests(experiment_request(body(source))) == digests


@pytest.mark.parametrize(
    ("source", "digest", "earlier"),
    [
        (SNAPSHOT, "673938b9ff081977b47f0d3e38f89c12", "0287d42e347ebdfe7a51be14f3099758"),
        (SANDBOX, "e3191d9a594f67387f90d2dbb5d7a1bb", "f003b2773015d43b11794ddd062a39b3"),
    ],
)
def test_a_request_under_a_key_has_them_too(source: Any, digest: str, earlier: str) -> None:
    key = Named("key", False, "POST /v1/experiments").request(body(source))
    assert key is not None
    assert (key.digest, key.earlier) == (digest, (earlier,))


@pytest.mark.parametrize(
    "other",
    [
        body(SANDBOX | {"image": "other"}),
        body(SANDBOX | {"limits": {}}),
        body(SANDBOX | {"providers": []}),
        body(SANDBOX, args=["./other"]),
        body(SANDBOX, budget={"calls": 99}),
        body(SANDBOX, score={"argv": ["pytest"]}),
        body(SANDBOX, variants=[{"label": "cold"}, {"label": "warm"}]),
        body(SNAPSHOT),
    ],
)
def test_another_description_has_none_of_them(other: ExperimentRequest) -> None:
    assert not {*_digests(experiment_request(body(SANDBOX)))} & {*_digests(experiment_request(other))}


def test_secrets_have_no_part_in_them() -> None:
    other = SANDBOX | {"secrets": {"TOKEN": "t2"}, "providers": [{"kind": "openai", "api_key": "sk-2"}]}
    assert _digests(experiment_request(body(other))) == _digests(experiment_request(body(SANDBOX)))


def test_a_field_that_is_added_later_changes_nothing_until_it_is_given() -> None:
    @record(frozen=True)
    class LaterRequest(CreateRequest):
        colour: str = "none"

    asked = CreateRequest(image="python", env={"A": "1"})
    later = LaterRequest(image="python", env={"A": "1"})
    assert encode_given(later) == encode_given(asked) == {"image": "python", "env": {"A": "1"}}
    assert encode_given(replace(later, colour="red")) == {"image": "python", "env": {"A": "1"}, "colour": "red"}

    @dataclass(frozen=True, slots=True)
    class LaterScorer(Scorer):
        colour: str = "none"

    assert _encode_given(LaterScorer(("true",))) == _encode_given(Scorer(("true",))) == {"argv": ("true",)}
