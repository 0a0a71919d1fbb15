"""Requests of the API as values of the engine. The records have been validated by their types and bounds; what else
makes a request malformed is a UsageError here, which names the part."""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

from snapshotd import types as t
from snapshotd.api.approvals import AskRequest
from snapshotd.api.commands import CommandFields
from snapshotd.api.experiments import BisectRequest, ExperimentRequest, ScorerFields, SpendingFields
from snapshotd.api.history import (
    EditFields,
    FileFields,
    MergeRequest,
    MessageFields,
    ResumeRequest,
    RewindQuery,
    RewindRequest,
)
from snapshotd.api.record import UNSET
from snapshotd.api.snapshots import TagRequest
from snapshotd.api.storage import ExportQuery, ImageRequest
from snapshotd.api.trajectories import (
    ForkQueueRequest,
    ForkRequest,
    NetworkRequest,
    Provider,
    RunAgentRequest,
    SandboxFields,
    VariantFields,
)
from snapshotd.api.values import SearchRequest
from snapshotd.api.wire import FILES_MAX_BYTES, check_ref, sandbox_path
from snapshotd.catalog.base import own_tenant, present_tenant
from snapshotd.engine import base
from snapshotd.engine.experiments import base as trials
from snapshotd.errors import LimitExceeded, NotPermitted, UsageError
from snapshotd.network import HostRule
from snapshotd.scores import SCORE_TIMEOUT_S, UNLIMITED, Spending
from snapshotd.terms import TENANT_VARIABLE

_URL = re.compile(r"https?://[A-Za-z0-9._~\[\]:-]{1,255}(/[!-~]{0,2048})?")
_VARIABLE_MAX_BYTES = (128 << 10) - 2
"""A variable with its `=` and zero byte is one string of execve(2), of at most MAX_ARG_STRLEN (32 pages)."""
_DEPTH_MAX = 64
_VALUES_MAX = 200_000
"""The bounds of an agent's records (docs/agent-protocol.md), so that a person cannot make a record that no agent could
read."""


# -- sandboxes and runs ------------------------------------------------------------------------------------------------


@singledispatch
def check(body: object) -> None:
    """UsageError, NotPermitted or NotFound for the body of a request, or None, in which something makes no sense that its types and
    bounds do not say."""


@check.register
def _(body: NetworkRequest) -> None:
    check_hosts((*body.allow, *(body.only or ())))


@check.register
def _(body: CommandFields) -> None:
    check_argv(body.argv)
    environment(body.env)


@check.register(ForkRequest)
@check.register(ForkQueueRequest)
def _(body: ForkRequest | ForkQueueRequest) -> None:
    check_argv(body.args or ())


@check.register
def _(body: BisectRequest) -> None:
    check_argv(body.argv)
    environment(body.env)
    for ref in (body.ref, body.good, body.bad):
        if ref is not None:
            check_ref(ref)


@check.register
def _(body: AskRequest) -> None:
    check_json(body.arguments, "the arguments")


@check.register
def _(body: SearchRequest) -> None:
    check_json(dict(body.where), "the search")


@check.register(RewindRequest)
@check.register(RewindQuery)
def _(body: RewindRequest | RewindQuery) -> None:
    check_ref(body.to)


@check.register
def _(body: MergeRequest) -> None:
    check_ref(body.source)
    if body.base is not None:
        check_ref(body.base)
    if body.path_b64 is not None:
        sandbox_path(body.path_b64)


@check.register
def _(body: ExportQuery) -> None:
    if body.since is not None:
        check_ref(body.since)


@check.register
def _(body: TagRequest) -> None:
    check_ref(body.ref)


@check.register
def _(body: ImageRequest) -> None:
    if "\0" in body.source:
        raise UsageError(f"{body.source[:40]!r} contains a zero byte, so it cannot be the source of an image")


@check.register
def check_sandbox(body: SandboxFields) -> None:
    """UsageError names the malformed part. NotPermitted, NotFound: see `check_provider`, `network`, `_check_path`, `own_tenant`."""
    check_name(body.name, "a name")
    check_variables(body.env, body.secrets, "given as a variable and as a secret")
    kinds = [item.kind for item in body.providers]
    if len(set(kinds)) < len(kinds):
        raise UsageError(
            "two providers of one kind were given, but a sandbox has at most one of each; leave one of them out"
        )
    _check_path(body.workspace, "workspace")
    environment(body.env)
    if body.network is not None:
        network(body.network)
    environment(body.secrets)
    for item in body.providers:
        check_provider(item)
    own_tenant(body.tenant)
    _check_path(body.requirements, "requirements file")
    _check_path(body.program, "folder of the program")


@check.register
def _(body: RunAgentRequest) -> None:
    if (body.agent is None) == (not body.command):
        raise UsageError("a run needs either an agent file or a command; give exactly one of them")
    if body.command and body.args:
        raise UsageError("`args` belong to an agent file; put a command's arguments into `command`")
    check_argv((*body.args, *body.command))
    check_sandbox(body)
    _check_path(body.agent, "agent file")


def check_provider(item: Provider) -> None:
    """UsageError never names the key. NotPermitted: a caller of one tenant would have the daemon speak to what only it
    reaches."""
    if present_tenant() is not None and not item.url.startswith("https://"):
        raise NotPermitted(
            f"the provider {item.kind} has an address without TLS, which may be one of the daemon's own network; give one that "
            "begins with https://"
        )
    if not _URL.fullmatch(item.url):
        raise UsageError(
            f"the address of the provider {item.kind} is malformed: write http:// or https://, a host and a path, without a password"
        )


def network(text: str) -> t.Network:
    """UsageError, LimitExceeded; NotPermitted: a caller of one tenant wants all that this machine reaches, or see `check_hosts`."""
    found = t.Network.parse(text)
    if found == t.Network.BRIDGE and present_tenant() is not None:
        raise NotPermitted(
            "bridge reaches all that the daemon's machine reaches, so only the daemon's own users and the scope admin may choose it; "
            "name hosts (allow:pypi.org), or all that are public (allow:*)"
        )
    if found == t.Network.HOST:
        raise UsageError(
            "host is no network of a sandbox: choose none, bridge, or allow: and the hosts that may be reached"
        )
    check_hosts(found.rules)
    return found


def check_hosts(rules: Iterable[str]) -> None:
    """NotPermitted: a caller of one tenant allows addresses, which may be of the daemon's own network. UsageError."""
    if present_tenant() is None:
        return
    for rule in map(HostRule.parse, rules):
        if rule.range is not None and not rule.denies:
            raise NotPermitted(
                f"{rule.text} is an address, which may be of the daemon's own network, so only the daemon's own users and the scope "
                "admin may allow it; allow hosts by their names"
            )


def variant(item: VariantFields) -> base.Variant:
    check_name(item.label, "a variant")
    check_argv(item.args or ())
    check_variables(item.env, item.secrets, f"a variable and a secret of the variant {item.label}")
    if item.model is not None and not item.model.isprintable():
        raise UsageError(f"the model of the variant {item.label} has characters that no model's name has")
    return base.Variant(
        item.label,
        item.name,
        item.args,
        environment(item.env),
        environment(item.secrets),
        None if item.edit is None else edit_request(item.edit),
        item.model,
        None if item.network is None else network(item.network),
        () if item.limits is None else tuple(sorted(item.limits.given.items())),
    )


def check_name(name: str | None, what: str) -> None:
    """UsageError for a text that cannot be the name of a thing, which is called `what`."""
    if name is not None and not t.NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be {what}: use up to 64 letters, digits and ._- , starting with a letter or digit"
        )


def check_variables(env: dict[str, str], secrets: dict[str, str], what: str) -> None:
    """UsageError: one is both."""
    twice = next((key for key in secrets if key in env), None)
    if twice is not None:
        raise UsageError(f"{twice} is {what}, so its value would be recorded; leave one of them out")


def absolute(path: str, what: str) -> Path:
    """UsageError for a relative path: the daemon's working directory is not the client's."""
    _check_bytes(path, f"the {what}")
    if "\0" in path:
        raise UsageError(f"the {what} {path!r} has a zero byte, which no path can have; leave that out")
    if not path.startswith("/"):
        raise UsageError(
            f"the {what} {path!r} is not an absolute path; the daemon does not know the client's working directory"
        )
    return Path(path)


def _check_path(path: str | None, what: str) -> None:
    """UsageError: as `absolute`. NotPermitted: the caller may name no path of this machine."""
    if path is not None and present_tenant() is not None:
        raise NotPermitted(
            f"the {what} is a path of the daemon's machine, which only its own users and the scope admin may name; copy the "
            "files into the sandbox instead"
        )
    if path is not None:
        absolute(path, what)


def environment(env: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """UsageError names a variable that no process can have."""
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + value or not key.isprintable():
            raise UsageError(
                f"{key[:40]!r} cannot be the name of an environment variable, or its value cannot be: a name has printable "
                "characters and no `=`, and neither has a zero byte; leave that out"
            )
        _check_bytes(key + value, f"the variable {key[:40]!r}")
        if len(os.fsencode(key + value)) > _VARIABLE_MAX_BYTES:
            raise LimitExceeded(
                f"the variable {key[:40]!r} has more than {_VARIABLE_MAX_BYTES} bytes, and the kernel starts no program with it; put "
                "it into a file"
            )
        if key == TENANT_VARIABLE:
            raise UsageError(f"{key} is set by the request's tenant; leave it out of the environment")
    return tuple(env.items())


def check_argv(argv: Sequence[str]) -> None:
    """UsageError for an argument that no process can get."""
    for item in argv:
        if "\0" in item:
            raise UsageError(f"the argument {item[:40]!r} contains a zero byte, which no command can receive")
        _check_bytes(item, f"the argument {item[:40]!r}")


def _check_bytes(text: str, what: str) -> None:
    """UsageError for text that no bytes stand for, as the system takes it."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise UsageError(f"{what} has text that is not Unicode (at character {exc.start}); leave that out") from None


# -- paths and files ---------------------------------------------------------------------------------------------------


def data_bytes(text: str, what: str, then: str) -> bytes:
    """The bytes that a base64 text stands for. UsageError calls it `what` and ends with `then`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise UsageError(f"{what} is not base64 ({exc}); {then}") from exc


def file_edit(item: FileFields) -> base.FileEdit:
    path = sandbox_path(item.path_b64)
    if not path:
        raise UsageError("the root itself cannot be edited; name a file")
    if item.content_b64 is None:
        return base.FileEdit(path, None)
    content = data_bytes(item.content_b64, f"the content of {path!r}", "encode the file's bytes")
    return base.FileEdit(path, content, item.mode)


# -- the mind ----------------------------------------------------------------------------------------------------------


def edit_request(body: EditFields, env: dict[str, str] | None = None) -> base.EditRequest:
    if body.messages is not None and body.drop_messages:
        raise UsageError(
            "a whole conversation was given, so there is nothing to drop; give `messages` or `drop_messages`"
        )
    edit = base.EditRequest(
        files=tuple(map(file_edit, body.files)),
        messages=None if body.messages is None else tuple(map(message, body.messages)),
        drop_messages=body.drop_messages,
        add_messages=tuple(map(message, body.add_messages)),
        result=optional_json(body.result, "the result"),
        state=tuple(check_json(body.state, "the state").items()),
        env=environment(env or {}),
    )
    paths = [item.path for item in edit.files]
    if len(set(paths)) < len(paths):
        raise UsageError("the same path is edited twice; say one thing about each path")
    return edit


def message(item: MessageFields) -> t.Message:
    if not item.role.isprintable():
        raise UsageError(f"{item.role!r} cannot be the role of a message: use printable characters")
    return t.Message(item.role, check_json(item.content, f"the content of a message of {item.role}"))


@check.register
def _(body: ResumeRequest) -> None:
    items = body.decisions
    calls = [item.call for item in items]
    twice = next((call for call in calls if calls.count(call) > 1), None) if len(set(calls)) < len(calls) else None
    if twice is not None:
        raise UsageError(f"call {twice} is decided twice; say one thing about each call")
    for item in items:
        given = optional_json(item.result, f"the result of call {item.call}")
        if item.action != "result" and given is not None:
            raise UsageError(
                f"a result was given for call {item.call}, which is to {item.action}; a result belongs to the action `result`"
            )


def optional_json(value: Any, what: str) -> tuple[Any] | None:
    """A field that may be left out, as a tuple of one; None: it was. Errors as `check_json`."""
    return None if value is UNSET else (check_json(value, what),)


def check_json(value: Any, what: str) -> Any:
    """`value`, if every reader of JSON can keep it: finite numbers, text without lone surrogates, bounded depth and
    count. UsageError and LimitExceeded call it `what`."""
    level, count = [value], 0
    for _ in range(_DEPTH_MAX + 1):
        below: list[Any] = []
        for item in level:
            count += 1
            if isinstance(item, dict):
                below += item.values()
                _check_text("".join(item), what)
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                _check_text(item, what)
            elif isinstance(item, float) and not math.isfinite(item):
                raise UsageError(f"{what} has a number that JSON does not know ({item}); use null or text")
        if count + len(below) > _VALUES_MAX:
            raise LimitExceeded(f"{what} has more than {_VALUES_MAX} values; put large data into a file")
        if not below:
            return value
        level = below
    raise LimitExceeded(f"{what} is nested deeper than {_DEPTH_MAX} levels; make it flatter")


def _check_text(text: str, what: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(
                f"{what} has text that is not Unicode ({exc.reason} at character {exc.start}); leave that out"
            ) from exc


# -- comparisons, scores, experiments ----------------------------------------------------------------------------------


def scorer(body: ScorerFields) -> trials.Scorer:
    """UsageError, LimitExceeded."""
    check_argv((*body.argv, *filter(None, (body.cwd, body.junit, body.files_path))))
    files = None
    if body.files_b64 is not None:
        try:
            files = base64.b64decode(body.files_b64, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise UsageError(f"the scorer's files are not base64 ({exc}); encode a tar of them") from exc
        if len(files) > FILES_MAX_BYTES:
            raise LimitExceeded(
                f"the scorer's files have {len(files)} bytes as a tar, and {FILES_MAX_BYTES} is the most"
            )
    return trials.Scorer(
        argv=body.argv,
        number=body.number,
        report=body.junit,
        files=files,
        where=body.files_path,
        cwd=body.cwd,
        env=environment(body.env),
        user=body.user,
        timeout_s=body.timeout_s,
    )


def experiment_request(body: ExperimentRequest) -> trials.ExperimentRequest:
    """As `check_sandbox`."""
    source, variants = body.source, tuple(map(variant, body.variants))
    if (named := next((one for one in variants if one.name is not None), None)) is not None:
        raise UsageError(f"the variant {named.label} has a name, but an experiment names its branches; leave it out")
    if isinstance(source, SandboxFields) and source.name is not None:
        raise UsageError("an experiment names the sandbox that it begins from; leave the name out")
    check_argv((*(body.args or ()), *body.protected))
    found = scorer(body.score)
    if isinstance(source, str):
        check_ref(source)
    else:
        check_sandbox(source)
    return trials.ExperimentRequest(
        name=body.name,
        source=source,
        variants=variants,
        scorer=found if found.timeout_s is not None else replace(found, timeout_s=SCORE_TIMEOUT_S),
        args=body.args,
        resume=body.resume,
        repeat=body.repeat,
        parallel=body.parallel,
        protected=body.protected,
        first_pass=body.first_pass,
        best_of=body.best_of,
        stop=_spending(body.stop),
        budget=_spending(body.budget),
        prices=(0.0, 0.0) if body.prices is None else (body.prices.input, body.prices.output),
    )


def _spending(body: SpendingFields | None) -> Spending:
    return UNLIMITED if body is None else Spending(**vars(body))
