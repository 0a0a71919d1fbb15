"""Every verb by every scope and tenant, made from the table of operations: a new verb is asked here as well. A caller of
one tenant learns nothing of another one, and changes nothing there; a token that opens nothing gets nothing."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import pytest

from snapshotd.api import operations
from snapshotd.api.operation import ADMIN, READ, Operation, Scope
from snapshotd.api.operations import OPERATIONS
from snapshotd.api.record import ApiRecord, Request, types_of
from snapshotd.api.wire import API_PREFIX
from snapshotd.catalog.base import as_tenant
from snapshotd.client import Snapshotd
from snapshotd.client.exchange import use_keys
from snapshotd.client.twofold import iterate, run
from snapshotd.daemon.access.principals import GRANTS
from snapshotd.daemon.access.tokens import Tokens
from snapshotd.daemon.http import decoding
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound, NotPermitted, UsageError
from snapshotd.types import new_id
from tests.any_request import ENDLESS, description
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon, start

SCOPES: tuple[Scope, ...] = get_args(Scope)
CANARY = "zq7canary"
"""Is in everything that the other tenant has: names, tags, files, outputs, arguments, values."""
REFS = frozenset({"ref", "refs", "to", "into", "source", "base", "good", "bad", "trajectory", "since", "a", "b"})
"""Members of bodies and queries that name a trajectory or snapshot."""
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class World:
    """A trajectory of a tenant, with one of everything that hangs on it."""

    tenant: str
    names: dict[str, str]
    """Path parameter to what stands for it."""
    ids: tuple[str, ...]


def make_world(client: Snapshotd, tenant: str, mark: str) -> World:
    name = f"{mark}-{tenant}-{next(_NUMBERS)}"
    trajectory, first = client.create(name=name, tenant=tenant)
    done = client.exec(name, ["sh", "-c", f"echo {mark} | tee {mark}.txt"])
    tag, experiment = f"{name}-tag", f"{name}-exp"
    client.tag(done.snapshot.id, tag)
    command = client.exec_in_background(name, ["cat"], stdin=True)
    call = new_id()
    asked = client.ask(name, call, "deploy", {"what": mark}, question="may it?")
    assert asked is not None
    client.put_value(f"{mark}/n", "k", mark, tenant=tenant)
    names = {"ref": name, "name": tag, "command": command.id, "approval": asked.id, "which": "stdout", "port": "80"}
    ids = (trajectory.id, first.id, done.snapshot.id, command.id, asked.id)
    return World(tenant, {**names, "experiment": experiment}, ids)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("s")
    daemon = start(folder / "state", folder / "s.sock", SMALL_LISTEN="http://127.0.0.1:0")
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def theirs(daemon: Daemon) -> World:
    world = make_world(daemon.client, "other", CANARY)
    body = {
        "name": world.names["experiment"],
        "source": world.names["ref"],
        "variants": [{"label": CANARY, "args": ["true"]}],
        "score": {"argv": ["true"]},
    }
    begin_experiment(daemon.client, body)
    eventually(lambda: daemon.client.experiment(world.names["experiment"]).ended is not None)
    return world


def begin_experiment(client: Snapshotd, body: dict[str, Any]) -> None:
    run(client._transport.request(*operations.CREATE_EXPERIMENT.at(), body=body, once=True))


@pytest.fixture(scope="module")
def tokens(daemon: Daemon) -> dict[str, str]:
    """Scope to a token, of the tenant acme but for admin."""
    return {
        scope: daemon.client.create_token(scope, scopes=[scope], tenant=None if scope == ADMIN else "acme").token
        for scope in SCOPES
    }


PLACES = ("ref", "name", "command", "approval", "which", "port", "experiment")


@cache
def listening(daemon: Daemon) -> SplitResult:
    """The address for other machines."""
    return urlsplit(str(daemon.client.status()["listening"]))


def ask(daemon: Daemon, token: str | None, operation: Operation[Any], names: dict[str, str]) -> tuple[int, str]:
    """Send a request for an operation about what `names` has; status and text of the answer."""
    address = listening(daemon)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    path = operation.path
    for place in PLACES:
        path = path.replace("{" + place + "}", quote(names[place], safe=""))
    path = path.replace("{ref:path}", "no-such-image").replace("{token}", "no-such-token")
    query = _query(operation, names)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    body = _body(operation, names)
    try:
        connection.request(
            operation.method, API_PREFIX + path + query, body, {**headers, "Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        endless = any(part in path for part in ENDLESS) and answer.status < 400
        return answer.status, (answer.read1(1 << 16) if endless else answer.read()).decode(errors="replace")
    finally:
        connection.close()


def _query(operation: Operation[Any], names: dict[str, str]) -> str:
    described = description()["paths"][API_PREFIX + operation.path.replace(":path", "")][operation.method.lower()]
    known = {
        "path_b64": base64.urlsafe_b64encode(f"workspace/{CANARY}.txt".encode()).decode(),
        "q": CANARY,
        "namespace": f"{CANARY}/n",
        "key": "k",
        "tenant": "other",
        "follow": "false",
        **dict.fromkeys(REFS, names["ref"]),
    }
    given = {
        one["name"]: known[one["name"]]
        for one in described.get("parameters", ())
        if one["in"] == "query" and one["name"] in known and not (one["name"] == "b" or one["name"] == "since")
    }
    if operation.name in ("put_value", "delete_value", "get_value", "value_history") and names.get("tenant"):
        given["tenant"] = names["tenant"]
    return "?" + urlencode(given) if given else ""


def _body(operation: Operation[Any], names: dict[str, str]) -> bytes | None:
    if operation.body is None:
        return None
    if isinstance(operation.body, str):
        attended = operation.name in ("exec_attended", "exec_snapshot_attended")
        return b'{"argv": ["true"]}\n' if attended else b"\0" * 1024
    return json.dumps(_record(operation.body, names)).encode()


def _record(record: type[ApiRecord], names: dict[str, str]) -> dict[str, Any]:
    """The required members, and all that name a trajectory or snapshot."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name in REFS and record.__name__ != "RestoreRequest":
            found[field.name] = [names["ref"], names["ref"]] if field.name == "refs" else names["ref"]
        elif needed or field.name in _SAID:
            found[field.name] = (
                _SAID[field.name] if field.name in _SAID else _value(types_of(record)[field.name], names)
            )
    return found


_SAID: dict[str, Any] = {
    "argv": ["true"],
    "path_b64": "d29ya3NwYWNlL3g=",
    "to_b64": "d29ya3NwYWNlL3k=",
    "signal": 15,
    "data_b64": "",
    "score": {"argv": ["true"]},
    "variants": [{"label": "v", "args": ["true"]}],
    "command": ["true"],
    "side_effect": "local",
    "call": "1" * 32,
    "mode": "both",
    "name": "a-new-name",
    "directory": "/tmp/no-such-directory",
    "calls": [],
}


def _value(hint: Any, names: dict[str, str]) -> Any:
    while get_origin(hint) is not None and hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, Request):
        return _record(hint, names)
    origin = get_origin(hint)
    if origin in (tuple, list):
        return []
    if origin is dict:
        return {}
    return {str: "x", int: 1, float: 1.0, bool: False}.get(hint, "x")


def names_something(operation: Operation[Any]) -> bool:
    """A request for it is about a trajectory, or about what hangs on one."""
    in_path = any("{" + place + "}" in operation.path for place in ("ref", "name", "command", "approval", "experiment"))
    body = operation.body
    in_body = isinstance(body, type) and any(field.name in REFS for field in dataclasses.fields(body))  # type: ignore[arg-type]
    return in_path or in_body or operation.path in ("/diff", "/patch")


def contents(daemon: Daemon, world: World) -> Any:
    """Everything of a world."""
    client = daemon.client
    ref = world.names["ref"]
    return (
        [one.id for one in client.log(ref)],
        client.trajectory(ref),
        client.all_snapshots()[-1:] and [one.tags for one in client.log(ref)],
        [(one.id, one.status) for one in client.commands(ref)],
        [(one.id, one.status) for one in client.approvals() if one.trajectory == world.ids[0]],
        client.get_value(f"{CANARY}/n", "k", tenant="other"),
        client.experiment(world.names["experiment"]).ended,
    )


def test_the_scope_of_a_daemons_own_user_opens_every_verb() -> None:
    """It sees all tenants: there is nothing to be kept from it."""
    assert {row.scope for row in OPERATIONS.values()} <= GRANTS[ADMIN]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_a_verb_is_open_to_its_scope_and_shows_nothing_of_another_tenant(
    operation: Operation[Any], daemon: Daemon, theirs: World, tokens: dict[str, str]
) -> None:
    before = contents(daemon, theirs)
    for scope in SCOPES:
        if scope != ADMIN:
            _refuse_or_show_nothing(operation, scope, theirs, *ask(daemon, tokens[scope], operation, theirs.names))
    assert contents(daemon, theirs) == before


def _refuse_or_show_nothing(operation: Operation[Any], scope: Scope, theirs: World, status: int, text: str) -> None:
    if operation.scope not in GRANTS[scope]:
        assert (status, json.loads(text)["error"]["code"]) == (403, "NotPermitted"), text
    elif operation is operations.SCORE:  # each snapshot that it cannot score carries its error
        assert json.loads(text.splitlines()[-1])["rows"][0]["error"].startswith("there is no snapshot"), text
    elif names_something(operation):
        assert (status, json.loads(text)["error"]["code"]) == (404, "NotFound"), text
    else:
        assert status < 500, text
    said = (
        text.replace(theirs.names["ref"], "").replace(theirs.names["experiment"], "").replace(theirs.names["name"], "")
    )
    told = [one for one in (CANARY, *(one[:12] for one in theirs.ids)) if one in said]
    assert told == [] or status == 404, text


@pytest.fixture(scope="module")
def looked_at(daemon: Daemon) -> World:
    """One of acme's own, for requests that change nothing."""
    return own_world(daemon, with_experiment=True)


def own_world(daemon: Daemon, *, with_experiment: bool) -> World:
    own = make_world(daemon.client, "acme", f"mine{os.getpid()}")
    body = {
        "name": own.names["experiment"],
        "source": own.names["ref"],
        "variants": _SAID["variants"],
        "score": {"argv": ["true"]},
    }
    if with_experiment:
        begin_experiment(daemon.client, body)
    return own


@pytest.mark.parametrize(
    "operation",
    [row for row in OPERATIONS.values() if names_something(row) and row.scope != ADMIN],
    ids=lambda row: row.name,
)
def test_the_same_request_finds_what_is_the_callers_own(
    operation: Operation[Any], daemon: Daemon, looked_at: World, owner: str
) -> None:
    """Else the requests above would find nothing in any case."""
    own = looked_at
    if operation.scope != READ:
        own = own_world(daemon, with_experiment="{experiment}" in operation.path)
    status, text = ask(daemon, owner, operation, own.names)
    assert status not in (401, 403), text
    assert status != 404 or ("there is no trajectory" not in text and "there is no snapshot" not in text), text


@pytest.fixture(scope="module")
def owner(daemon: Daemon) -> str:
    """A token of acme that opens what is not the daemon's own users'."""
    return daemon.client.create_token("owner", scopes=["run", "approve"], tenant="acme").token


# -- tokens that open nothing ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def useless(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What somebody might show who has no token."""
    client = daemon.client
    revoked, expired, known = (
        client.create_token(name, scopes=["admin"], expires_s=expires).token
        for name, expires in (("revoked", None), ("expired", 0.2), ("known", None))
    )
    client.revoke_token("revoked")
    foreign = Tokens(tmp_path_factory.mktemp("t") / "tokens.json").create("known", ["admin"])[1]
    eventually(lambda: next(one for one in client.tokens() if one.name == "expired").has_expired)
    return {
        "none": None,
        "empty": "",
        "revoked": revoked,
        "expired": expired,
        "of another daemon": foreign,
        "cut": known[:-1],
        "changed": known[:-1] + ("A" if known[-1] != "A" else "B"),
        "another's secret": known[:12] + revoked[12:],
        "long": "x" * 20_000,
    }


def _refused(daemon: Daemon, operation: Operation[Any], theirs: World, what: str, token: str | None) -> None:
    status, text = ask(daemon, token, operation, theirs.names)
    assert (status, json.loads(text)["error"]["code"]) == (401, "NotPermitted"), (what, text)
    assert token is None or len(token) < 9 or token[-20:] not in text
    assert not any(one[:12] in text for one in theirs.ids)


def test_a_token_that_opens_nothing_gets_nothing(daemon: Daemon, theirs: World, useless: dict[str, str | None]) -> None:
    """Every verb asks for one; what opens nothing is the same for all, so each is shown at one verb of each scope."""
    before = contents(daemon, theirs)
    for operation in OPERATIONS.values():
        for what in ("none", "revoked"):
            _refused(daemon, operation, theirs, what, useless[what])
    for operation in (operations.TRAJECTORY, operations.EXEC, operations.APPROVE_CALL, operations.TOKENS):
        for what, token in useless.items():
            _refused(daemon, operation, theirs, what, token)
    assert contents(daemon, theirs) == before


def test_nothing_but_the_api_is_served(daemon: Daemon, tokens: dict[str, str]) -> None:
    address = urlsplit(str(daemon.client.status()["listening"]))
    for target, token, expected in (
        ("/v1/openapi.json", None, 401),
        ("/v1/openapi.json", tokens["read"], 200),
        ("/v1/nothing", tokens["read"], 404),
        ("/v1/nothing", None, 401),
        ("http://elsewhere/v1/version", None, 401),
    ):
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        connection.request("GET", target, None, {} if token is None else {"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == expected, target
        connection.close()


def test_no_token_is_in_logs_errors_and_arguments(daemon: Daemon, tokens: dict[str, str]) -> None:
    secret = daemon.client.create_token("told-nowhere", scopes=["run"], tenant="acme")
    assert secret.token not in repr(secret)
    for operation in (operations.TRAJECTORIES, operations.TRAJECTORY, operations.USAGE, operations.SHUTDOWN):
        ask(daemon, secret.token, operation, {**dict.fromkeys(PLACES, "nothing")})
    files = ("daemon.log", "audit.log", "tokens.json", "catalog.db", "catalog.db-wal")
    kept = b"".join((daemon.state_dir / name).read_bytes() for name in files)
    assert b"told-nowhere" in kept
    assert secret.token.rpartition("_")[2].encode() not in kept
    assert not any(token.encode() in kept for token in tokens.values())


# -- a tenant's own ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def acme(daemon: Daemon) -> Snapshotd:
    """A client of the tenant acme on another machine."""
    token = daemon.client.create_token("acme", scopes=["run", "approve"], tenant="acme").token
    return Snapshotd(host=str(daemon.client.status()["listening"]), token=token)


def test_a_tenant_sees_its_own(daemon: Daemon, theirs: World, acme: Snapshotd) -> None:
    own = make_world(daemon.client, "acme", "seen")
    line = own.ids[0]
    daemon.client.flush()
    lists: dict[str, list[str]] = {
        "trajectories": [one.id for one in acme.trajectories()],
        "sandboxes": [one.trajectory.id for one in acme.sandboxes()],
        "overview": [one.trajectory.id for one in acme.overview()],
        "snapshots": [one.trajectory for one in acme.all_snapshots()],
        "approvals": [one.trajectory for one in acme.approvals()],
        "stats": [one.trajectory for one in acme.stats().sandboxes],
        "disk": [one.trajectory for one in acme.stats(trajectories=1000).disk],
    }
    assert {name for name, found in lists.items() if line not in found} == set()
    assert {name for name, found in lists.items() if theirs.ids[0] in found} == set()
    eventually(lambda: line in [hit.trajectory for hit in acme.find("seen").hits])
    assert theirs.ids[0] not in [hit.trajectory for hit in acme.find(CANARY, limit=200).hits]
    assert theirs.ids[0] in [hit.trajectory for hit in daemon.client.find(CANARY, limit=200).hits]
    assert acme.get_value("seen/n", "k").value == "seen"
    assert theirs.names["experiment"] not in [one.name for one in acme.experiments()]
    assert theirs.names["experiment"] in [one.name for one in daemon.client.experiments()]
    assert acme.cat(own.names["ref"], "/workspace/seen.txt") is not None


def test_what_a_tenant_makes_is_its_own(daemon: Daemon, acme: Snapshotd) -> None:
    own = make_world(daemon.client, "acme", "made")
    (fork,) = acme.fork(own.names["ref"]).trajectories
    with pytest.raises(NotFound):
        Snapshotd(host=acme._transport.way.place, token=_token(daemon, "other")).trajectory(fork.id)
    assert fork.id in [one.id for one in acme.trajectories()]
    edited = acme.edit(own.names["ref"], env={"A": "1"})
    assert acme.trajectory(edited.id).id == edited.id


def watch(client: Snapshotd) -> Iterator[dict[str, Any]]:
    """The daemon's events, on one connection."""
    return iterate(run(client._transport.lines(*operations.WATCH.at())))


def _token(daemon: Daemon, tenant: str) -> str:
    return daemon.client.create_token(f"{tenant}-{next(_NUMBERS)}", scopes=["run"], tenant=tenant).token


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"workspace": "/etc"}, NotPermitted),
        ({"requirements": "/etc/passwd"}, NotPermitted),
        ({"program": "/etc"}, NotPermitted),
        ({"runtime": "none"}, NotPermitted),
        ({"tenant": "other"}, NotFound),
        ({"env": {"SNAPSHOTD_TENANT": "other"}}, UsageError),
        ({"secrets": {"SNAPSHOTD_TENANT": "other-tenant"}}, UsageError),
        ({"providers": [{"kind": "openai", "base_url": "http://169.254.169.254/"}]}, NotPermitted),
        ({"image": "no-such-image"}, (NotFound, NotPermitted)),
    ],
)
def test_a_tenant_gets_no_hold_of_the_daemons_machine(
    fields: dict[str, Any], error: type[Exception], acme: Snapshotd, daemon: Daemon
) -> None:
    before = {one.id for one in daemon.client.trajectories()}
    for operation, more in ((operations.CREATE, {}), (operations.RUN_AGENT, {"command": ["true"]})):
        with pytest.raises(error):
            run(acme._transport.request(*operation.at(), body={**fields, **more}))
    source = {"name": "an-experiment", "source": fields, "variants": _SAID["variants"], "score": {"argv": ["true"]}}
    with pytest.raises(error):
        begin_experiment(acme, source)
    assert {one.id for one in daemon.client.trajectories()} == before


def test_a_tenant_allows_hosts_by_name_alone(daemon: Daemon, acme: Snapshotd) -> None:
    ref = make_world(daemon.client, "acme", "hosts").names["ref"]
    for change in ({"allow": ["10.0.0.1"]}, {"only": ["10.0.0.0/8"]}):
        with pytest.raises(NotPermitted, match="by their names"):
            acme.network(ref, **change)
    with pytest.raises(Conflict):  # a folder has no rules
        acme.network(ref, allow=["example.org"], deny=["10.0.0.1"])
    with pytest.raises(NotPermitted, match="by their names"):
        acme.fork(ref, variants={"a": {"network": "allow:169.254.169.254"}})
    rules = "allow:pypi.org,!10.0.0.0/8"
    with as_tenant("acme"):
        assert str(decoding.network(rules)) == rules
        for text in ("allow:pypi.org,10.0.0.1", "allow:[fd00::]/8:22"):
            with pytest.raises(NotPermitted, match="by their names"):
                decoding.network(text)
        with pytest.raises(NotPermitted, match="bridge reaches all"):
            decoding.network("bridge")
    assert decoding.network("allow:10.0.0.1").rules == ("10.0.0.1",)
    assert str(decoding.network("bridge")) == "bridge"


def test_a_tenant_hears_of_its_own_alone(daemon: Daemon, theirs: World, acme: Snapshotd) -> None:
    own = make_world(daemon.client, "acme", "heard")
    with contextlib.closing(watch(acme)) as events:
        assert next(events)["event"] == "watching"
        daemon.client.exec(theirs.names["ref"], ["true"])
        daemon.client.exec(own.names["ref"], ["true"])
        daemon.client.remove(own.names["ref"], force=True)
        heard = []
        for event in events:
            heard.append(event)
            if event["event"] == "trajectory" and event["trajectory"] not in [one.id for one in acme.trajectories()]:
                break
    assert {event["trajectory"] for event in heard if "trajectory" in event} == {own.ids[0]}


def test_each_tenant_hears_of_what_it_makes_while_it_watches(daemon: Daemon, acme: Snapshotd) -> None:
    place = str(daemon.client.status()["listening"])
    others = Snapshotd(host=place, token=_token(daemon, "other"))
    clients = {"acme": acme, "other": others}
    with contextlib.ExitStack() as opened:
        watches = {name: opened.enter_context(contextlib.closing(watch(one))) for name, one in clients.items()}
        for events in watches.values():
            assert next(events)["event"] == "watching"
        made = dict[str, set[str]]()
        for name, client in clients.items():
            own = make_world(daemon.client, name, f"{name}-watched")
            (fork,) = client.fork(own.names["ref"]).trajectories
            made[name] = {own.ids[0], fork.id}
        for name, events in watches.items():
            heard = set[str]()
            while not made[name] <= heard:
                event = next(events)
                heard |= {event["trajectory"]} if "trajectory" in event else set()
            assert heard == made[name]


def test_the_key_of_another_tenants_request_tells_nothing(daemon: Daemon) -> None:
    worlds = {tenant: make_world(daemon.client, tenant, "use_keys") for tenant in ("acme", "other")}
    with use_keys("the same"):
        daemon.client.exec(worlds["other"].names["ref"], ["true"])
    acme = Snapshotd(host=str(daemon.client.status()["listening"]), token=_token(daemon, "acme"))
    with use_keys("the same"):
        done = acme.exec(worlds["acme"].names["ref"], ["echo", "mine"])
    assert done.snapshot.trajectory == worlds["acme"].ids[0]


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_what_is_open_with_a_token_is_cut_when_it_ends(daemon: Daemon, how: str) -> None:
    name = f"open-{how}"
    made = daemon.client.create_token(name, scopes=["read"], expires_s=5 if how == "expired" else None)
    there = Snapshotd(host=str(daemon.client.status()["listening"]), token=made.token)
    events = watch(there)
    assert next(events)["event"] == "watching"
    if how == "revoked":
        daemon.client.revoke_token(name)
    with pytest.raises(DaemonUnavailable):
        for _ in events:
            pass
    with pytest.raises(NotPermitted):
        there.version()


def test_a_person_elsewhere_decides_under_the_name_of_the_token(daemon: Daemon, acme: Snapshotd) -> None:
    own = make_world(daemon.client, "acme", "decided")
    decided = acme.approve(own.names["approval"], by="somebody else")
    assert decided.by == "acme"


def test_it_is_recorded_who_did_what(daemon: Daemon, acme: Snapshotd, theirs: World) -> None:
    own = make_world(daemon.client, "acme", "recorded")
    acme.exec(own.names["ref"], ["true"])
    with pytest.raises(NotFound):
        acme.trajectory(theirs.names["ref"])
    daemon.client.tokens()
    ask(daemon, "sdt_00000000_wrong", operations.VERSION, theirs.names)
    found = daemon.client.audit(last=20)
    told = [(one.caller, one.tenant, one.address, one.verb, one.status) for one in found]
    assert told[-3:] == [
        ("acme", "acme", "127.0.0.1", "exec_attended", "200"),
        ("acme", "acme", "127.0.0.1", "trajectory", "404"),
        (None, None, "127.0.0.1", None, "401"),
    ]
    assert (local_name(), None, None, "exec_attended", "200") in told
    assert not any(one.address is None and one.verb in ("trajectory", "version", "tokens", "audit") for one in found)
    assert (daemon.state_dir / "audit.log").stat().st_mode & 0o777 == 0o600


def local_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
