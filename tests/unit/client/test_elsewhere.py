"""A daemon on another machine: through TLS, known by its certificate's fingerprint or by who signed it, and through ssh; in
both clients and the command line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api import operations
from snapshotd.client import AsyncSnapshotd, Snapshotd
from snapshotd.client.remote.logins import Login, find_login, logins_path, remove_login, save_login
from snapshotd.client.remote.ssh import SshWay
from snapshotd.client.remote.tls import TlsWay
from snapshotd.client.twofold import iterate, run
from snapshotd.errors import DaemonUnavailable, NotFound, NotPermitted, SnapshotdError, UsageError
from tests.unit.daemon.process import Daemon, start

BOX = "box"
LARGE = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("s")
    daemon = start(folder / "state", folder / "s.sock", SMALL_LISTEN="127.0.0.1:0", SMALL_PORTS="1")
    daemon.client.create(name=BOX, tenant="acme")
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def place(daemon: Daemon) -> dict[str, str]:
    status = daemon.client.status()
    token = daemon.client.create_token("t", scopes=["run"], tenant="acme").token
    return {"host": status["listening"], "pin": status["fingerprint"], "token": token}


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("SNAPSHOTD_HOST", "SNAPSHOTD_TOKEN", "SNAPSHOTD_TLS_PIN", "SNAPSHOTD_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "config"


def test_everything_that_a_client_sends_and_gets_comes_through(place: dict[str, str], tmp_path: Path) -> None:
    client = Snapshotd(**place)
    (source := tmp_path / "large").write_bytes(LARGE)
    client.upload(BOX, source, "/workspace/large")
    assert b"".join(client.read_file(BOX, "/workspace/large")) == LARGE
    client.download(BOX, "/workspace/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == LARGE
    heard: list[bytes] = []
    done = client.exec(
        BOX, ["sh", "-c", "wc -c"], stdin=io.BytesIO(LARGE), on_output=lambda _, data: heard.append(data)
    )
    assert (done.exit_code, b"".join(heard).strip()) == (0, b"%d" % len(LARGE))
    assert client.restore(BOX, tmp_path / "out", path="/workspace").file_count == 1
    assert (tmp_path / "out" / "large").read_bytes() == LARGE
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SnapshotdError, match="not an empty folder"):
        client.restore(BOX, tmp_path / "full")
    size = client.export_file(BOX, tmp_path / "bundle").bytes
    assert (tmp_path / "bundle").stat().st_size == size > len(LARGE)


def test_the_asynchronous_client_does_the_same(place: dict[str, str], tmp_path: Path) -> None:
    (source := tmp_path / "large").write_bytes(LARGE)

    async def work() -> None:
        client = AsyncSnapshotd(**place)
        await client.upload(BOX, source, "/workspace/async")
        assert b"".join([piece async for piece in client.read_file(BOX, "/workspace/async")]) == LARGE
        await client.download(BOX, "/workspace/async", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == LARGE
        done = await asyncio.gather(
            *(client.exec(BOX, ["sh", "-c", "cat > /dev/null"], stdin=io.BytesIO(LARGE)) for _ in range(3))
        )
        assert [one.exit_code for one in done] == [0, 0, 0]

    asyncio.run(work())


def test_a_server_of_a_sandbox_is_reached(place: dict[str, str]) -> None:
    client = Snapshotd(**place)
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = operations.CONNECT.to(BOX, str(server.getsockname()[1]))
        conversation = run(client._transport.carry(path))
        run(conversation.send(b"abc"))
        connected, _ = server.accept()
        with connected:
            connected.settimeout(60)
            connected.sendall(connected.recv(100)[::-1])
            frames = iterate(run(conversation.frames()))
            assert next(frames) == b"cba"
            conversation.break_off()
            assert end_of(connected), "the server meets the end of a client that goes away, and says nothing meanwhile"


def end_of(connected: socket.socket) -> bool:
    try:
        return connected.recv(100) == b""
    except ConnectionResetError:
        return True


def test_only_the_daemon_that_is_meant_gets_the_token(place: dict[str, str]) -> None:
    other = {**place, "pin": "sha256:" + "0" * 64}
    for wrong in (other, {**place, "pin": None}):
        with pytest.raises(NotPermitted, match="certificate"):
            Snapshotd(**wrong).version()
        with pytest.raises(NotPermitted, match="certificate"):
            asyncio.run(AsyncSnapshotd(**wrong).version())


def test_a_certificate_may_be_known_by_who_signed_it(daemon: Daemon, place: dict[str, str]) -> None:
    ca = daemon.state_dir / "tls" / "cert.pem"
    assert Snapshotd(host=place["host"], token=place["token"], ca=ca).version().version
    with pytest.raises(UsageError, match="cannot be read"):
        Snapshotd(host=place["host"], token=place["token"], ca=ca.with_name("none")).version()


@pytest.mark.parametrize(
    "host",
    [
        "https://",
        "https://a/b",
        "https://user:secret@a",
        "https://a?x",
        "http://192.0.2.1",
        "http://example.org",
        "ftp://a",
        "a:80",
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://-x@a",
        "ssh://%2Dx@a",
        "ssh://a;b",
        "ssh://a$(b)@c",
        "ssh://a%20b@c",
        "ssh://a%60b%60@c",
        "ssh://a\nb",
        "https://a:99999",
    ],
)
def test_what_is_no_place_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        Snapshotd(host=host, token="t")


@pytest.mark.parametrize("given", [{"pin": "sha256:12"}, {"token": "two words"}, {"token": "new\nline"}])
def test_what_is_no_pin_or_token_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        TlsWay("https://a", **given)


def test_paths_of_this_machine_are_not_sent(place: dict[str, str], tmp_path: Path) -> None:
    client = Snapshotd(**place)
    calls: list[Any] = [
        lambda: client.create(workspace=tmp_path),
        lambda: client.run(agent=tmp_path / "a.py"),
        lambda: client.run(command=["true"], requirements=tmp_path / "r"),
        lambda: client.mount(tmp_path),
        lambda: client.unmount(tmp_path),
        lambda: client.build_image(str(tmp_path)),
        lambda: client.import_image("./x.tar"),
        lambda: client.socket_path,
        lambda: client.state_dir,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="on another machine"):
            call()


def test_logins_are_for_their_user_alone(config: Path) -> None:
    login = Login("a-token", "sha256:" + "1" * 64)
    save_login("https://a:7676", login)
    assert logins_path().stat().st_mode & 0o777 == 0o600
    assert (find_login("https://a:7676"), find_login("https://b:7676")) == (login, Login())
    assert "a-token" not in repr(login)
    logins_path().chmod(0o644)
    with pytest.raises(NotPermitted, match="chmod 600"):
        find_login("https://a:7676")
    logins_path().chmod(0o600)
    remove_login("https://a:7676")
    with pytest.raises(NotFound):
        remove_login("https://a:7676")
    logins_path().write_text("{")
    with pytest.raises(UsageError, match="damaged"):
        find_login("https://a:7676")


def snapshotd(*args: str, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment}
    return subprocess.run(
        [sys.executable, "-m", "snapshotd", *args], input=given, env=env, capture_output=True, text=True, timeout=60
    )


def test_a_login_serves_commands_and_clients(place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    host = place["host"]
    refused = snapshotd("login", host, given=place["token"])
    assert (refused.returncode, "--pin" in refused.stderr) == (NotPermitted.exit_code, True)
    wrong = snapshotd("login", host, "--pin", place["pin"], given="sdt_wrong")
    assert wrong.returncode == NotPermitted.exit_code
    assert not logins_path().exists()
    done = snapshotd("login", host, "--pin", place["pin"], given=place["token"] + "\n")
    assert done.returncode == 0, done.stderr
    assert place["token"] not in done.stdout + done.stderr
    listed = snapshotd("ls", "--json", SNAPSHOTD_HOST=host)
    assert [one["name"] for one in json.loads(listed.stdout)] == [BOX], listed.stderr
    monkeypatch.setenv("SNAPSHOTD_HOST", host)
    assert Snapshotd().trajectory(BOX).name == BOX
    monkeypatch.setenv("SNAPSHOTD_TOKEN", "sdt_other")
    with pytest.raises(NotPermitted, match="token"):
        Snapshotd().version()
    assert snapshotd("logout", host).returncode == 0
    assert json.loads(logins_path().read_text()) == {"hosts": {}}


def test_what_is_named_in_the_command_comes_first(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SNAPSHOTD_HOST", "https://127.0.0.1:1")
    assert Snapshotd(socket=daemon.socket_path).version().pid == daemon.process.pid
    with pytest.raises(DaemonUnavailable, match="no daemon answers at"):
        Snapshotd().version()
    monkeypatch.setenv("SNAPSHOTD_HOST", f"unix://{daemon.socket_path}")
    assert Snapshotd().version().pid == daemon.process.pid


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `ssh` that runs the command here, and writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "snapshotd").write_text(f'#!/bin/sh\nexec {sys.executable} -m snapshotd "$@"\n')
    (folder / "ssh").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nwhile [ "$1" != -- ]; do shift; done\n[ "$2" = nobody ] && exit 255\nexec sh -c "$3"\n'
    )
    for name in ("ssh", "snapshotd"):
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    return tmp_path / "calls"


def test_a_daemon_is_reached_through_ssh(daemon: Daemon, ssh: Path) -> None:
    host = f"ssh://me@build.example.org:2222{daemon.socket_path}"
    client = Snapshotd(host=host)
    assert client.version().pid == daemon.process.pid
    heard: list[bytes] = []
    done = client.exec(BOX, ["wc", "-c"], stdin=io.BytesIO(LARGE), on_output=lambda _, data: heard.append(data))
    assert (done.exit_code, b"".join(heard).strip()) == (0, b"%d" % len(LARGE))
    called = ssh.read_text().splitlines()[0]
    assert called.startswith("-T -o ConnectTimeout=30 ")
    assert called.endswith(f"-p 2222 -- me@build.example.org snapshotd --socket {daemon.socket_path} dial")

    async def work() -> int:
        return (await AsyncSnapshotd(host=host).version()).pid

    assert asyncio.run(work()) == daemon.process.pid
    with pytest.raises(UsageError, match="on another machine"):
        client.create(workspace="/etc")


def test_ssh_that_fails_says_so(ssh: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="exit code 255"):
        Snapshotd(host="ssh://nobody").version()


def test_a_machine_without_ssh_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DaemonUnavailable, match="install it"):
        Snapshotd(host="ssh://build").version()


def test_words_of_a_place_are_no_shell(ssh: Path) -> None:
    way = SshWay("ssh://a/run/x%3B%20touch%20y")
    assert way._argv[-1] == "snapshotd --socket '/run/x; touch y' dial"


def test_importing_the_client_brings_nothing_of_it_along() -> None:
    code = (
        "import sys, snapshotd.client as c; c.Snapshotd(socket='/x');"
        "print([m for m in sys.modules if m in ('ssl', 'subprocess', 'hashlib') or 'client.remote' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
