"""Commands in the background, from the client to the engine and back."""

from __future__ import annotations

import base64
import os
import socket

import pytest

from snapshotd.client import ExecFailed, Sandbox
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import run
from snapshotd.daemon.http.streams import IDLE_MAX
from snapshotd.errors import CommandNotFound, Conflict, NotFound, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.fixture
def box(shared_daemon: Daemon) -> Sandbox:
    return Sandbox.create(name=f"box-{new_id()[:8]}", client=shared_daemon.client)


def test_one_is_started_found_written_to_and_waited_for(box: Sandbox) -> None:
    command = box.exec(["cat"], background=True, stdin=True)
    info = command.info
    assert (info.status, info.exit_code, info.ended_at, info.stdin) == ("running", None, None, True)
    assert [one.id for one in box.commands()] == [command.id]
    again = box.command(command.id[:9])
    big = bytes(range(256)) * 2000
    again.write(big)
    again.write("end", end=True)
    heard: list[bytes] = []
    result = command.wait(on_stdout=heard.append)
    assert result.stdout_bytes == b"".join(heard) == big + b"end"
    assert (result.exit_code, result.snapshot_id) == (0, box.head().id)
    assert b"".join(data for _, data in command.output()) == big + b"end"
    assert (command.info.status, command.info.snapshot) == ("done", result.snapshot_id)
    with pytest.raises(Conflict):
        command.write("more")


def test_a_follower_hears_output_as_it_comes(box: Sandbox) -> None:
    command = box.exec(["cat"], background=True, stdin=True)
    follower = command.output(follow=True)
    for word in (b"one", b"two"):
        command.write(word)
        assert next(follower) == ("stdout", word)
    command.kill()
    assert list(follower) == []
    assert command.wait().exit_code == 137
    command.kill()


def test_its_end_can_be_checked(box: Sandbox) -> None:
    failed = box.exec(["fail", "3", "no luck"], background=True)
    with pytest.raises(ExecFailed, match="exit code 3: no luck"):
        failed.wait(check=True)
    forever = box.exec(["forever"], background=True)
    forever.signal(15)
    assert (forever.wait().exit_code, forever.info.status) == (143, "failed")


def test_errors_say_what_to_do(box: Sandbox, shared_daemon: Daemon) -> None:
    with pytest.raises(CommandNotFound):
        box.exec(["missing"], background=True)
    with pytest.raises(NotFound, match="snapshotd ps"):
        box.command("ffffffff")
    command = box.exec(["forever"], background=True)
    with pytest.raises(UsageError, match="without an input"):
        command.write("x")
    for number in (0, 65, -9):
        with pytest.raises(UsageError, match=r"^number="):
            command.signal(number)
    with pytest.raises(UsageError, match="in the background"):
        box.exec("true", stdin=True)  # type: ignore[call-overload]
    for options in ({"check": True}, {"wait": "stored"}, {"if_head": "x"}, {"on_stdout": print}):
        with pytest.raises(UsageError, match="in the background"):
            box.exec("true", background=True, **options)  # type: ignore[call-overload]
    for timeout in (0, -1.0, float("inf")):
        with pytest.raises(UsageError, match="timeout"):
            box.exec("true", background=True, timeout=timeout)
    command.kill()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {"argv": []}),
        ("", {"argv": ["a\0b"]}),
        ("", {"argv": ["true"], "stdin": "perhaps"}),
        ("", {"argv": ["true"], "timeout_s": -1}),
        ("/{id}/signal", {"signal": 0}),
        ("/{id}/signal", {"signal": "TERM"}),
        ("/{id}/stdin", {"data_b64": "***"}),
        ("/{id}/stdin", {"data_b64": base64.b64encode(bytes(1 << 20)).decode()}),
    ],
)
def test_bad_requests_change_nothing(box: Sandbox, shared_daemon: Daemon, path: str, body: dict[str, object]) -> None:
    command = box.exec(["cat"], background=True, stdin=True)
    target = f"/trajectories/{box.id}/commands" + path.format(id=command.id)
    with pytest.raises(UsageError):
        run(Transport(shared_daemon.socket_path).request("POST", target, body=body))
    assert [one.info.status for one in box.commands()] == ["running"]
    command.kill()


def test_a_follower_that_goes_away_leaves_nothing(box: Sandbox, shared_daemon: Daemon) -> None:
    command = box.exec(["cat"], background=True, stdin=True)
    followers = [command.output(follow=True) for _ in range(3)]
    command.write("one")
    for follower in followers:
        assert next(follower) == ("stdout", b"one")
        follower.close()  # type: ignore[attr-defined]
    command.write("y", end=True)
    eventually(lambda: command.info.status == "done")


def test_a_follower_that_has_left_holds_no_thread(daemon: Daemon) -> None:
    """Nothing happens in its command: nothing is sent that would fail."""
    box = Sandbox.create(client=daemon.client)
    command = box.exec(["sleep", "1000"], background=True)
    at_rest, many = threads_of(daemon), 3 * IDLE_MAX
    followers = []
    for _ in range(many):
        follower = socket.socket(socket.AF_UNIX)
        follower.connect(str(daemon.socket_path))
        path = f"/v1/trajectories/{box.id}/commands/{command.id}/events?follow=true"
        follower.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert follower.recv(12) == b"HTTP/1.1 200"
        followers.append(follower)
    assert threads_of(daemon) >= at_rest + many - IDLE_MAX
    for follower in followers:
        follower.close()
    eventually(lambda: threads_of(daemon) <= at_rest + IDLE_MAX)


def threads_of(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/task"))
