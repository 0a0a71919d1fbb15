"""A sandbox that reaches some hosts by name: real sandboxes, and a server of this machine as the host that is allowed.

`tests/system/test_egress.py` has the attacks on the proxy itself, with servers and names of its own.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, Snapshotd
from tests.e2e.hello_server import ASK, hello_server
from tests.e2e.support import Snap, processes_with, wait_until

HOSTILE = """
import socket
def tried(*args):
    try:
        socket.socket(*args).close()
        return "made"
    except OSError as exc:
        return type(exc).__name__
print(tried(socket.AF_INET, socket.SOCK_RAW, 1), tried(socket.AF_PACKET, socket.SOCK_RAW, 0))
s = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
s.settimeout(5)
try:
    s.connect(("2001:db8::1", 443)); print("connected")
except OSError as exc:
    print("no ipv6")
try:
    print(socket.getaddrinfo("secret.evil.example", 443))
except OSError:
    print("no such name")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with hello_server() as address:
        yield address


def asked(snap: Snap, box: str, host: str, port: int) -> str:
    answer: str = snap.json("exec", box, "--", "python3", "-c", ASK, host, str(port))["stdout"].strip()
    return answer


def refused(snap: Snap, ref: str) -> list[str]:
    found: list[str] = snap.json("log", ref)[-1]["refused"]
    return found


@contextlib.contextmanager
def box_with(snap: Snap, *args: str) -> Iterator[str]:
    box, _ = snap.create(*args)
    try:
        yield box
    finally:
        snap("rm", "--force", box)


@pytest.mark.each_runtime
def test_only_what_is_allowed_is_reached_and_what_is_refused_is_on_the_snapshot(
    snap: Snap, runtime: str, server: tuple[str, int]
) -> None:
    host, port = server
    with box_with(snap, "--runtime", runtime, "--network", f"allow:{host}:{port},*.pypi.org") as box:
        assert asked(snap, box, host, port) == "hello"
        assert asked(snap, box, host, port + 1) == "ConnectionRefusedError"
        assert refused(snap, box) == [f"{host}:{port + 1}: no rule allows this port"]
        assert asked(snap, box, "9.9.9.9", 443) == "ConnectionResetError"
        assert refused(snap, box) == ["9.9.9.9:443: no rule allows it"]
        done = snap.json("exec", box, "--", "python3", "-c", HOSTILE)["stdout"].split("\n")
        assert done[:3] == ["PermissionError PermissionError", "no ipv6", "no such name"]
        assert refused(snap, box) == ["secret.evil.example: no rule allows this name"]
        assert "refused" in snap("show", box).stdout
        assert asked(snap, box, host, port) == "hello"
        assert refused(snap, box) == []


def test_the_hosts_are_changed_while_it_runs_and_inherited(snap: Snap, runtime: str, server: tuple[str, int]) -> None:
    host, port = server
    rule = f"{host}:{port}"
    with box_with(snap, "--runtime", runtime, "--network", "allow:") as box:
        assert asked(snap, box, host, port) == "ConnectionRefusedError"
        assert snap.json("network", box, "--allow", rule)["rules"] == [rule]
        assert asked(snap, box, host, port) == "hello"
        snap("stop", box)
        assert asked(snap, box, host, port) == "hello", "the next sandbox of the trajectory has them"
        (fork,) = snap.json("fork", box)["trajectories"]
        snap("network", box, "--deny", "*")
        assert asked(snap, box, host, port) == "ConnectionRefusedError"
        assert asked(snap, fork, host, port) == "hello", "a fork has them from the time it was made"
        assert snap.json("ls")[-1]["network"] == f"allow:{rule}"
        snap("rm", "--force", fork)
        assert snap("network", box).stdout == ""
        assert snap.json("network", box, "--only", "pypi.org", "--deny", "files.pypi.org")["rules"] == ["pypi.org"]


@pytest.mark.long  # while nothing starts: the test before
def test_the_hosts_are_changed_while_a_service_starts_that_needs_them(snap: Snap, server: tuple[str, int]) -> None:
    host, port = server
    rule, ready = f"{host}:{port}", f"python3 -c 'import socket; socket.create_connection((\"{host}\", {port}), 5)'"
    with box_with(snap, "--network", f"allow:{rule}") as box:
        service = ("--detach", "--service", "reaches", "--ready", ready, "--ready-timeout", "40")
        snap("exec", *service, box, "--", "sleep", "1000000")
        snap("network", box, "--deny", "*")
        snap("stop", box)
        with snap.start("exec", box, "--", "echo", "begun") as begun:
            wait_until(lambda: "starting" in snap("ps", box).stdout, "the service starts")
            snap("network", box, "--only", rule)
            printed, said = begun.communicate(timeout=60)
        assert printed == "begun\n"
        assert "did not come back" not in said, "nobody waited until the service had no time left"


def test_what_has_no_rules_cannot_be_changed(snap: Snap) -> None:
    with box_with(snap, "--network", "none") as box:
        said = snap("network", box, "--allow", "pypi.org", code=6).stderr
        assert "has no rules for hosts" in said
    for wrong in ("allow:http://pypi.org", "allow:1.2.3"):
        assert "is no rule for hosts" in snap("create", "--network", wrong, code=125).stderr
    assert "is no network" in snap("create", "--network", "bridges", code=125).stderr


def test_a_folder_without_isolation_has_no_rules(snap: Snap) -> None:
    assert (
        "needs a sandbox with isolation"
        in snap("create", "--isolation", "none", "--network", "allow:pypi.org", code=125).stderr
    )


def proxies(snap: Snap, container: str = "") -> list[int]:
    """The proxies of a container, by default of the one sandbox that runs."""
    name = (container or snap.json("ps")[0]["container"])[:12]
    return [pid for pid, line in processes_with("snapshotd.egress.main") if line.split()[-1] == name]


@pytest.mark.long  # one that is started again later: system/test_egress.py
def test_a_proxy_that_is_killed_is_started_again_and_ends_with_its_sandbox(
    own_snap: Snap, server: tuple[str, int]
) -> None:
    host, port = server
    with box_with(own_snap, "--network", f"allow:{host}:{port}") as box:
        container = own_snap.json("ps")[0]["container"]
        assert asked(own_snap, box, host, port) == "hello"
        (before,) = proxies(own_snap)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: set(proxies(own_snap)) - {before} != set(), "another proxy runs")
        wait_until(lambda: asked(own_snap, box, host, port) == "hello", "the host is reached again")
    wait_until(lambda: not proxies(own_snap, container), "it has ended with its sandbox")


@pytest.mark.long  # a proxy that is started again later: system/test_egress.py
def test_a_sandbox_that_outlives_the_daemon_keeps_its_way_out(own_snap: Snap, server: tuple[str, int]) -> None:
    host, port = server
    with box_with(own_snap, "--network", f"allow:{host}:{port}") as box:
        own_snap("exec", "--detach", box, "--", "sleep", "1000")
        container = own_snap.json("ps")[0]["container"]
        before = proxies(own_snap, container)
        assert len(before) == 1
        own_snap.kill_daemon()
        assert proxies(own_snap, container) == before
        assert asked(own_snap, box, host, port) == "hello"
        assert proxies(own_snap, container) == before
        own_snap("network", box, "--allow", f"{host}:{port + 1}")
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: proxies(own_snap, container) not in ([], before), "the next daemon mends it")
        wait_until(lambda: asked(own_snap, box, host, port) == "hello", "the host is reached again")
        assert asked(own_snap, box, host, port + 1) == "ConnectionResetError", "it is open, and nobody listens there"
        own_snap.kill_daemon()
    wait_until(lambda: not proxies(own_snap, container), "it has ended with its sandbox")


def test_a_daemon_that_dies_leaves_no_proxy_behind(own_snap: Snap) -> None:
    with box_with(own_snap, "--network", "allow:pypi.org"):
        container = own_snap.json("ps")[0]["container"]
        assert proxies(own_snap, container)
        own_snap.kill_daemon()
        own_snap("ls")
        wait_until(lambda: not proxies(own_snap, container), "it has ended with its sandbox")


AGENT = """
import os, socket, sys, time
from snapshotd.agent import tool

def reach():
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as s:
            s.sendall(b"*1"); s.shutdown(socket.SHUT_WR)
            return s.recv(100).decode() or "nothing"
    except OSError:
        return "nothing"

@tool
def note(number):
    with open("/workspace/log", "a") as log:
        print(number, file=log)
    return number

print("at first", reach(), flush=True)
for number in range(3):
    print(note(number), reach(), flush=True)
while not os.path.exists("/workspace/go"):
    time.sleep(0.05)
"""
SERVICES = """
[services.reaches]
command = "exec sleep 1000000"
ready = "python3 -c 'import socket; socket.create_connection((\\"%s\\", %d), 5)'"
ready_timeout = 20
"""


@pytest.mark.long  # a replay reaches nobody: test_what_happened_outside_does_not_happen_again in test_gateway.py
@pytest.mark.parametrize("kind", ["allow", pytest.param("bridge", marks=pytest.mark.long)])
@pytest.mark.timeout(300)
def test_a_replay_reaches_nothing_and_what_comes_behind_it_has_its_network_and_services(
    own_snap: Snap, server: tuple[str, int], tmp_path: Path, kind: str
) -> None:
    """No model call is recorded of this program: it is its own code between two calls that reaches out."""
    snap, (host, port) = own_snap, server
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "services.toml").write_text(SERVICES % (host, port))
    network = "bridge" if kind == "bridge" else f"allow:{host}:{port}"
    options = ("--network", network, "--name", "looks", "--services", tmp_path / "services.toml")
    with snap.start("run", *options, tmp_path / "agent.py", host, str(port)) as run:
        assert run.stdout is not None
        assert [run.stdout.readline() for _ in range(4)] == ["at first hello\n", *(f"{n} hello\n" for n in range(3))]
        snap.crash()
        run.communicate(timeout=120)
    looks = Sandbox.connect("looks", client=Snapshotd(snap.state_dir))
    (fork,) = looks.head().fork(resume=True)
    looks.resume()
    for line in (fork, looks):
        wait_until(lambda line=line: b"2 " in printed(line), "it has met what is recorded")  # type: ignore[misc]
        assert printed(line) == b"at first nothing\n0 nothing\n1 nothing\n2 hello\n"
        (reaches,) = [one.info for one in line.commands() if one.info.status == "running"]
        assert reaches.service_state == "ready"
        assert not [event for event in line.events(follow=False) if event["event"] == "warning"]
        line.exec("touch go")
        assert line.wait().exit_code == 0
        line.remove(force=True)


def printed(sandbox: Sandbox) -> bytes:
    return b"".join(
        base64.b64decode(event["data_b64"]) for event in sandbox.events(follow=False) if event.get("stream") == "stdout"
    )
