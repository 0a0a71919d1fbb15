"""The sandboxes of E2B's clients within their bounds: hosts by name, the tenant of a key, slow and many requests."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from snapshotd.terms import DEFAULT_TENANT, TENANT_VARIABLE
from tests.e2b_rig import Served, environment, served
from tests.e2e.hello_server import ASK, hello_server
from tests.e2e.support import Snap

pytestmark = pytest.mark.runc
OTHER = f"e2b_{secrets.token_hex(20)}"


@pytest.fixture(scope="module")
def server(own_snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its clients have the key of the default tenant, or OTHER, which is acme's."""
    folder = tmp_path_factory.mktemp("e2b")
    with open(os.open(folder / "e2b.key", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(f"e2b_{secrets.token_hex(20)}\n{OTHER} acme\n")
    with served(own_snap, folder, "--network", "none") as running, environment(running.env):
        yield running


@pytest.fixture
def sdk(server: Served) -> Any:
    import e2b  # a second

    return e2b


@pytest.fixture
def hello() -> Iterator[tuple[str, int]]:
    with hello_server() as address:
        yield address


def asked(box: Any, host: str, port: int) -> str:
    return str(box.commands.run(f"python3 - {host} {port} <<'EOF'\n{ASK}\nEOF").stdout.strip())


def tenant(snap: Snap, box: Any) -> str:
    """The tenant that the catalog has for a sandbox."""
    with closing(sqlite3.connect(f"file:{snap.state_dir / 'catalog.db'}?mode=ro", uri=True)) as catalog:
        (env,) = catalog.execute("SELECT env FROM trajectories WHERE id = ?", (box.sandbox_id,)).fetchone()
    return str(dict(json.loads(env)).get(TENANT_VARIABLE, DEFAULT_TENANT))


@pytest.mark.long  # without E2B: test_network.py; its words: unit/integrations/test_e2b_networks.py
def test_hosts_are_allowed_and_changed_while_it_runs(sdk: Any, own_snap: Snap, hello: tuple[str, int]) -> None:
    host, port = hello
    allowed = {"allow_out": [f"{host}:{port}"], "deny_out": lambda ctx: [ctx.all_traffic]}
    with sdk.Sandbox.create(network=allowed) as box:
        assert asked(box, host, port) == "hello"
        assert asked(box, host, port + 1) == "ConnectionRefusedError"
        assert own_snap.json("log", box.sandbox_id)[-1]["refused"] == [f"{host}:{port + 1}: no rule allows this port"]
        assert box.get_info().network["allow_out"] == allowed["allow_out"]
        box.update_network({"allow_internet_access": False})
        assert asked(box, host, port) == "ConnectionRefusedError"
        assert box.get_info().allow_internet_access is False
        box.update_network({"allow_out": ["pypi.org"], "deny_out": ["0.0.0.0/0"]})
        assert own_snap.json("network", box.sandbox_id)["rules"] == ["pypi.org"]
        box.update_network({**allowed, "deny_out": ["0.0.0.0/0"]})
        assert asked(box, host, port) == "hello"
        forked = box.fork()[0]
        assert asked(forked, host, port) == "hello"
        forked.kill()
        box.pause()
        again = sdk.Sandbox.connect(box.sandbox_id)
        assert asked(again, host, port) == "hello"
        with pytest.raises(sdk.SandboxException, match="400: 'not a name' is no rule"):
            again.update_network({"allow_out": ["not a name"], "deny_out": ["0.0.0.0/0"]})
        assert asked(again, host, port) == "hello"


def test_a_network_without_rules_stays_as_it_is(sdk: Any) -> None:
    with sdk.Sandbox.create() as box:
        box.update_network({})
        with pytest.raises(sdk.SandboxException, match="501"):
            box.update_network({"allow_internet_access": True})


def test_what_is_made_with_a_key_belongs_to_its_tenant(sdk: Any, own_snap: Snap) -> None:
    with sdk.Sandbox.create() as mine, sdk.Sandbox.create(api_key=OTHER) as theirs:
        assert theirs.commands.run("echo $HOME").stdout == "/home/user\n"
        assert [tenant(own_snap, box) for box in (mine, theirs)] == [DEFAULT_TENANT, "acme"]
        for key, box in ((OTHER, mine), (None, theirs)):
            more = {} if key is None else {"api_key": key}
            assert box.sandbox_id not in [one.sandbox_id for one in sdk.Sandbox.list(**more).next_items()]
            with pytest.raises(sdk.SandboxException, match="not found"):
                sdk.Sandbox.connect(box.sandbox_id, **more)
        kept = theirs.create_snapshot()
        with pytest.raises(sdk.SandboxException, match="404"):
            sdk.Sandbox.create(kept.snapshot_id)
        with sdk.Sandbox.create(kept.snapshot_id, api_key=OTHER) as again:
            assert tenant(own_snap, again) == "acme"


@pytest.mark.long  # of the page, with the same server: unit/page/test_room.py
def test_a_head_that_does_not_come_is_not_waited_for(server: Served, sdk: Any) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    begun = time.monotonic()
    held = []
    for sent in (b"", b"GET /sandboxes HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"POST /sandboxes HTTP/1.1\r\n"):
        connection = socket.create_connection((host, int(port)), timeout=30)
        connection.sendall(sent)
        held.append(connection)
    whole = socket.create_connection((host, int(port)), timeout=30)
    whole.sendall(b"GET /sandboxes HTTP/1.1\r\nHost: x\r\n\r\n")
    assert whole.recv(64).startswith(b"HTTP/1.1 401")
    whole.sendall(b"GET /sandboxes HTTP/1.1\r\n")  # the next head on the same connection
    held.append(whole)
    for connection in held:
        with connection:
            _drain(connection, begun)
    assert sdk.Sandbox.list().next_items() is not None


@pytest.mark.long  # which networks: unit/integrations/test_e2b_networks.py
def test_without_isolation_nothing_is_made_that_would_reach_everything(tmp_path: Path) -> None:
    import e2b

    plain = Snap(tmp_path / "state")
    plain = Snap(plain.state_dir, {**plain.env, "SNAPSHOTD_MODE": "folder"})
    hosts = {"allow_out": ["pypi.org"], "deny_out": ["0.0.0.0/0"]}
    with served(plain, tmp_path, "--network", "none") as server, environment(server.env):
        for wanted in ({"allow_internet_access": False}, {"network": hosts}, {}):
            with pytest.raises(e2b.SandboxException, match=r"501: the network .* needs a sandbox with isolation"):
                e2b.Sandbox.create(**wanted)
    assert plain.json("ls") == []
    plain("daemon", "--stop")


@pytest.mark.long  # test_serving.py shows it with a small server
@pytest.mark.timeout(600)
def test_ten_thousand_connections_that_stay_leave_the_sdk_its_answers(server: Served, sdk: Any) -> None:
    """Those of somebody without a key: half of them have asked and been refused, a quarter are in a head, a quarter silent."""
    flood = 10_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < flood + 500:
        pytest.skip("this machine allows too few open files for a process")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, flood + 500), hard))
    host, port = server.address.removeprefix("http://").split(":")
    said = (b"GET /sandboxes HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /sandboxes HTTP/1.1\r\nX-Slow: ", b"")
    try:
        with sdk.Sandbox.create() as box, contextlib.ExitStack() as opened:
            for number in range(flood):
                one = opened.enter_context(socket.socket())
                one.settimeout(60)
                one.connect((host, int(port)))
                with contextlib.suppress(ConnectionError):
                    one.sendall(said[max(0, number % 4 - 1)])
                if number % 1000 == 999:
                    assert box.commands.run("echo here").stdout == "here\n"
            assert box.sandbox_id in [one.sandbox_id for one in sdk.Sandbox.list().next_items()]
            box.files.write("given", "here")
            assert box.files.read("given") == "here"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long  # test_serving.py shows that what comes behind an answer is cut, in a moment
@pytest.mark.parametrize("has_key", [False, True])
def test_a_body_without_end_is_refused(server: Served, sdk: Any, has_key: bool) -> None:
    host, port = server.address.removeprefix("http://").split(":")
    key = f"X-API-Key: {server.key}\r\n" if has_key else ""
    for length in ("Content-Length: 99999999999", "Transfer-Encoding: chunked"):
        with socket.create_connection((host, int(port)), timeout=60) as one:
            one.sendall(f"POST /sandboxes HTTP/1.1\r\nHost: x\r\n{key}{length}\r\n\r\n".encode())
            sender = threading.Thread(target=_send_without_end, args=(one,))
            sender.start()
            answer = one.recv(4096)
            assert answer.split()[1] == (b"413" if has_key else b"401")
            sender.join(60)
            assert not sender.is_alive(), "the server takes it all"
    assert sdk.Sandbox.list().next_items() is not None


def _send_without_end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def _drain(connection: socket.socket, begun: float) -> None:
    """The connection ends, while its other end says a little now and then."""
    connection.settimeout(1)
    while time.monotonic() - begun < 30:
        try:
            connection.sendall(b"x")
            if not connection.recv(4096):
                return
        except TimeoutError:
            continue
        except OSError:
            return
    raise AssertionError("the connection is still open")
