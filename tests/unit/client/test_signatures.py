"""Every argument of every verb, of a type that it cannot have: a UsageError that names it, before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd import client
from snapshotd.api.commands import ExecRequest
from snapshotd.api.experiments import ScoreRequest
from snapshotd.api.storage import Policy
from snapshotd.api.trajectories import CreateRequest, ForkQueueRequest, LimitsRequest, Provider
from snapshotd.client.local import signatures
from snapshotd.client.twofold import _Verb
from snapshotd.errors import UsageError

ANY_VALUE = {"value", "result", "arguments", "changes", "client"}
"""Arguments that are whatever JSON has, that another verb checks, or whose type depends on the form of the client."""


class Nothing:
    """No argument of any verb is one."""


def verbs() -> Iterator[tuple[type, str, inspect.Signature]]:
    for cls in (client.Snapshotd, client.Sandbox, client.Snapshot, client.Command):
        for name in dir(cls):
            found = inspect.getattr_static(cls, name)
            if not name.startswith("_") and isinstance(found, _Verb):
                signature = inspect.signature(found._bind(None, cls))
                if len(signature.parameters) > 1:
                    yield cls, name, signature


def types_of(cls: type, name: str) -> dict[str, Any]:
    types = signatures._parameters(inspect.unwrap(inspect.getattr_static(cls, name)._bind(None, cls)))
    return {name: hint for name, hint in types.items() if name != "client"}


def arguments() -> Iterator[Any]:
    for cls, name, signature in verbs():
        for parameter in list(signature.parameters.values())[1:]:
            options = (parameter.name,)
            if parameter.kind is parameter.VAR_KEYWORD:
                options = tuple(sorted(set(types_of(cls, name)) - set(signature.parameters)))
            for argument in options:
                if argument not in ANY_VALUE:
                    yield pytest.param(cls, name, argument, id=f"{cls.__name__}.{name}({argument})")


def plausible(hint: Any) -> Any:
    """A value of a type."""
    for value in ("a" * 8, 1, b"a", ["a"], print, {"a": "a"}, {"a": {}}, BytesIO(), Policy()):
        try:
            signatures.check_type("value", value, hint)
        except UsageError:
            continue
        return value
    raise AssertionError(hint)


@pytest.fixture
def objects(tmp_path: Path) -> dict[type, Any]:
    """They have a client that has nobody to ask."""
    asked = client.Snapshotd(tmp_path, autostart=False)
    info: Any = SimpleNamespace(id="5" * 64, name="box", trajectory="6" * 32, argv=("a",), seq=1)
    made = {cls: cls(asked, info) for cls in (client.Sandbox, client.Snapshot, client.Command)}
    return {client.Snapshotd: asked, **made}


@pytest.mark.parametrize(("cls", "name", "argument"), list(arguments()))
def test_an_argument_of_no_type_that_it_can_have_is_named(
    objects: dict[type, Any], cls: type, name: str, argument: str
) -> None:
    verb, types = getattr(objects[cls], name), types_of(cls, name)
    parameters = inspect.signature(verb).parameters
    args: list[Any] = []
    given = {argument: Nothing()}
    if "client" in parameters:
        given["client"] = objects[client.Snapshotd]
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += [given.pop(argument)] if argument == parameter.name else []
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            given.setdefault(parameter.name, plausible(types[parameter.name]))
    with pytest.raises(UsageError, match=r"^\w+=.* cannot be taken: give ") as raised:
        verb(*args, **given)
    assert raised.value.message.startswith(f"{argument}=")


def test_every_annotation_is_understood() -> None:
    """No name in it stands for any type because only type checkers know it."""
    for cls, name, _ in verbs():
        for parameter, hint in types_of(cls, name).items():
            assert hint is not Any or parameter in ANY_VALUE, (cls, name, parameter)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ExecRequest((), None), "argv=() cannot be taken: give a list whose length is at least 1"),
        (ExecRequest(("a\udcff",)), r"argv[0]='a\udcff' cannot be taken: give text that UTF-8 has"),
        (ExecRequest(("a",), timeout_s=float("nan")), "timeout_s=nan cannot be taken: give a number "),
        (ScoreRequest(("a",), refs=("a",), repeat=0), "repeat=0 cannot be taken: give a number at least 1 and at most"),
        (ForkQueueRequest(1, -1), "parallel=-1 cannot be taken: give a number at least 1"),
        (CreateRequest(limits=LimitsRequest(cpus=True)), "cpus=True cannot be taken: give a number"),
        (
            CreateRequest(secrets={"A": "\udcff"}),
            "secrets['A']=<class 'str'> cannot be taken: give text that UTF-8 has",
        ),
        (CreateRequest(providers=(Provider("openai", api_key=5),)), "api_key=<class 'int'> cannot be taken"),  # type: ignore[arg-type]
    ],
)
def test_a_request_out_of_its_bounds_is_not_sent(request_: Any, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        signatures.check_request(request_)
    assert raised.value.message.startswith(said)


def test_a_keyword_that_a_verb_does_not_have_is_refused(objects: dict[type, Any]) -> None:
    """Also where its keywords are those of a TypedDict, so that none gets into a request under another name."""
    asked = objects[client.Snapshotd]
    for call in (
        lambda: asked.exec("box", ["a"], timeout_s=1.0),
        lambda: asked.create(idle_timeout_s=1.0),
        lambda: asked.ensure_image("a", memory_bytes=1),
        lambda: asked.bisect("box", ["a"], timeout=1.0),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            call()
