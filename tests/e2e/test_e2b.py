"""`snapshotd serve --e2b` with the unmodified SDK for Python, a real daemon and real sandboxes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2b_rig import Served, environment, served
from tests.e2e.model_rig import from_npm, node
from tests.e2e.support import Snap, wait_until

pytestmark = pytest.mark.runc
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations" / "e2b.md"
JAVASCRIPT = "2.51.0"
"""The version of the SDK of npm."""


@pytest.fixture(scope="module")
def server(own_snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(own_snap, tmp_path_factory.mktemp("e2b"), "--network", "none") as running, environment(running.env):
        yield running


@pytest.fixture
def sdk(server: Served) -> Any:
    import e2b  # a second

    return e2b


@pytest.fixture
def box(sdk: Any) -> Iterator[Any]:
    sandbox = sdk.Sandbox.create(timeout=300, metadata={"test": "tour"}, envs={"FROM_BOX": "box"})
    yield sandbox
    sandbox.kill()


def steps(snap: Snap, sandbox: str) -> list[tuple[str, str]]:
    return [(step["tool"]["name"], step["tool"]["status"]) for step in snap.json("log", sandbox)]


def test_commands(box: Any, sdk: Any, own_snap: Snap) -> None:
    before = len(steps(own_snap, box.sandbox_id))
    done = box.commands.run("echo out; echo err >&2; pwd; id -un; echo $HOME $FROM_BOX $MORE", envs={"MORE": "more"})
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n/home/user\nuser\n/home/user box more\n", "err\n", 0)
    assert box.commands.run("id -un; pwd", user="root", cwd="/tmp").stdout == "root\n/tmp\n"
    with pytest.raises(sdk.CommandExitException) as failed:
        box.commands.run("echo no; exit 7")
    assert (failed.value.exit_code, failed.value.stdout) == (7, "no\n")
    assert steps(own_snap, box.sandbox_id)[before:] == [("exec", "done"), ("exec", "done"), ("exec", "failed")]
    said: list[str] = []
    box.commands.run("for n in 1 2 3; do echo $n; done", on_stdout=said.append)
    assert "".join(said) == "1\n2\n3\n"
    with pytest.raises(sdk.TimeoutException):
        box.commands.run("sleep 30", timeout=1)
    wait_until(lambda: box.commands.list() == [], "the command has ended")


@pytest.mark.long  # without E2B: test_background.py
def test_commands_in_the_background(box: Any, sdk: Any, own_snap: Snap) -> None:
    reader = box.commands.run("while read -r line; do echo got $line; done; echo end", background=True, stdin=True)
    assert [one.pid for one in box.commands.list()] == [reader.pid]
    box.commands.send_stdin(reader.pid, "one\n")
    box.commands.stream_input(reader.pid, ["two\n", b"three\n"])
    box.commands.close_stdin(reader.pid)
    assert reader.wait().stdout == "got one\ngot two\ngot three\nend\n"

    beats = box.commands.run("echo first; while :; do echo beat; sleep 0.1; done", background=True)
    assert next(iter(beats))[0].startswith("first\n")
    beats.disconnect()
    again = box.commands.connect(beats.pid)
    assert next(iter(again))[0].startswith("beat\n")
    assert box.commands.run("echo beside").stdout == "beside\n"
    assert box.commands.kill(beats.pid)
    with pytest.raises(sdk.CommandExitException):
        again.wait()
    assert not box.commands.kill(beats.pid)
    with pytest.raises(sdk.NotFoundException):
        box.commands.connect(beats.pid)


@pytest.mark.long  # without E2B: test_terminal.py
def test_a_terminal(box: Any, sdk: Any) -> None:
    shown = bytearray()

    def shows(*words: bytes) -> None:
        try:
            wait_until(lambda: all(word in shown for word in words), "the terminal answers")
        except AssertionError as exc:
            raise AssertionError(f"no {words} in {bytes(shown)!r}") from exc

    terminal = box.pty.create(sdk.PtySize(rows=30, cols=90), cwd="/tmp", envs={"PS1": "> "}, timeout=300)
    reading = threading.Thread(target=lambda: terminal.wait(on_pty=shown.extend))
    reading.start()
    box.pty.send_stdin(terminal.pid, b"stty size; tty; pwd\n")
    shows(b"30 90", b"/dev/pts/", b"/tmp")
    box.pty.resize(terminal.pid, sdk.PtySize(rows=40, cols=100))
    box.pty.stream_input(terminal.pid, [b"stty ", "size\n"])
    shows(b"40 100")
    box.pty.send_stdin(terminal.pid, b"exit\n")
    reading.join(30)
    assert not reading.is_alive()

    kept = box.pty.create(sdk.PtySize(24, 80))
    kept.disconnect()
    followed = box.pty.connect(kept.pid)
    box.pty.send_stdin(kept.pid, b"echo o''k\n")
    seen = bytearray()
    for _, _, pty in followed:
        seen += pty or b""
        if b"ok" in seen:
            break
    assert box.pty.kill(kept.pid)
    wait_until(lambda: box.commands.list() == [], "the terminal has ended")


def test_files(box: Any, sdk: Any, own_snap: Snap) -> None:
    files = box.files
    before = len(steps(own_snap, box.sandbox_id))
    info = files.write("notes.txt", "one\n")
    assert (info.path, info.name) == ("/home/user/notes.txt", "notes.txt")
    assert steps(own_snap, box.sandbox_id)[before:] == [("write", "done")]
    assert files.read("notes.txt") == "one\n"
    assert files.read("~/notes.txt", format="bytes") == bytearray(b"one\n")
    assert b"".join(files.read("/home/user/notes.txt", format="stream")) == b"one\n"
    several = [{"path": f"deep/{n}/file", "data": f"{n}\n"} for n in range(3)]
    before = len(steps(own_snap, box.sandbox_id))
    assert [one.path for one in files.write_files(several)] == [f"/home/user/deep/{n}/file" for n in range(3)]
    assert len(steps(own_snap, box.sandbox_id)) == before + 1
    large = bytes(range(256)) * (40 << 10)
    files.write("large", io.BytesIO(large))
    files.write("packed", large, gzip=True)
    files.write("parts", large, use_octet_stream=False)
    for name in ("large", "packed", "parts"):
        assert files.read(name, format="bytes", gzip=True) == large
    assert box.commands.run("stat -c '%U %a' large deep/1/file").stdout == "user 644\nuser 644\n"
    files.write("empty", "")
    assert files.read("empty") == ""
    hosts = [] if own_snap.json("inspect", box.sandbox_id)[0]["runtime"] == "runc" else ["/etc/hosts"]
    for mounted in ("/proc/sys/kernel/hostname", "/dev/null", *hosts):
        with pytest.raises(sdk.SandboxException, match="mounted"):
            files.write(mounted, "mine", user="root")
    if not hosts:
        files.write("/etc/hosts", "127.0.0.1 mine\n", user="root")
        assert box.commands.run("cat /etc/hosts").stdout == "127.0.0.1 mine\n"

    entry = files.get_info("notes.txt")
    assert (entry.size, entry.owner, entry.group, entry.permissions) == (4, "user", "user", "-rw-r--r--")
    assert (entry.type, entry.mode) == (sdk.FileType.FILE, 0o644)
    box.commands.run("ln -s notes.txt link; ln -s nowhere dangling")
    link = files.get_info("link")
    assert (link.type, link.symlink_target, link.path) == (
        sdk.FileType.SYMLINK,
        "/home/user/notes.txt",
        "/home/user/link",
    )
    assert files.exists("dangling")
    assert {one.name for one in files.list(".")} >= {"notes.txt", "deep", "link", "large"}
    assert {one.path for one in files.list("deep", depth=2)} == {
        *(f"/home/user/deep/{n}" for n in range(3)),
        *(f"/home/user/deep/{n}/file" for n in range(3)),
    }
    assert files.make_dir("made/below")
    assert not files.make_dir("made/below")
    assert files.rename("notes.txt", "made/moved.txt").path == "/home/user/made/moved.txt"
    assert not files.exists("notes.txt")
    files.remove("made")
    assert not files.exists("made/moved.txt")
    files.remove("made")
    for wrong in (lambda: files.read("gone"), lambda: files.get_info("gone"), lambda: files.list("gone")):
        with pytest.raises(sdk.FileNotFoundException):
            wrong()
    with pytest.raises(sdk.InvalidArgumentException):
        files.read("deep")
    with pytest.raises(sdk.TemplateException):
        files.write("meta", "x", metadata={"a": "b"})
    with pytest.raises(sdk.AuthenticationException):
        files.write("x", "x", user="nobody-here")


def test_a_path_leads_nowhere_but_into_the_sandbox(box: Any, sdk: Any) -> None:
    box.files.write("../../../../etc/of-sandbox", "inside")
    assert not Path("/etc/of-sandbox").exists()
    assert box.commands.run("cat /etc/of-sandbox").stdout == "inside"
    box.commands.run("ln -s ../../../../../../etc/of-sandbox link; ln -s /proc/1/root up")
    assert box.files.read("link") == "inside"
    with pytest.raises(sdk.InvalidArgumentException):
        box.files.read("up/etc/passwd")  # /proc is no file of the sandbox


@pytest.mark.long  # test_the_asynchronous_sdk watches, too
def test_watching(box: Any, sdk: Any) -> None:
    box.files.make_dir("watched/deep")
    watcher = box.files.watch_dir("watched", recursive=True)
    kinds = sdk.FilesystemEventType
    seen: list[tuple[str, Any]] = []

    def until(*wanted: tuple[str, Any]) -> None:
        def all_seen() -> bool:
            seen.extend((one.name, one.type) for one in watcher.get_new_events())
            return set(wanted) <= set(seen)

        wait_until(all_seen, f"{wanted} of {seen}")

    box.files.write("watched/new", "x")
    until(("new", kinds.CREATE), ("new", kinds.WRITE))
    box.files.write("watched/deep/other", "x")
    until(("deep/other", kinds.CREATE))
    box.commands.run("chmod 600 watched/new")
    until(("new", kinds.CHMOD))
    box.files.rename("watched/new", "watched/old")
    until(("new", kinds.RENAME), ("old", kinds.CREATE))
    box.files.remove("watched/old")
    until(("old", kinds.REMOVE))
    watcher.stop()
    with pytest.raises(sdk.FileNotFoundException):
        box.files.watch_dir("nothing")


def test_paused_and_resumed(box: Any, sdk: Any, own_snap: Snap) -> None:
    box.files.write("kept", "kept")
    box.commands.run("sleep 1000", background=True, timeout=0)
    assert box.pause()
    assert not box.pause()
    assert own_snap.json("inspect", box.sandbox_id)[0]["status"] == "stopped"
    assert box.get_info().state == sdk.SandboxState.PAUSED
    assert not box.is_running()
    with pytest.raises(sdk.SandboxNotRunningException):
        box.commands.run("true")
    same = sdk.Sandbox.connect(box.sandbox_id, timeout=600)
    assert same.is_running()
    assert same.files.read("kept") == "kept"
    assert same.commands.list() == []
    assert same.get_info().state == sdk.SandboxState.RUNNING


def test_snapshots_and_forks(box: Any, sdk: Any, own_snap: Snap) -> None:
    box.files.write("state", "first")
    kept = box.create_snapshot(name="first-state")
    assert kept.names == ["first-state:default"]
    box.files.write("state", "second")
    later = box.create_snapshot()
    assert {one.snapshot_id for one in box.list_snapshots().next_items()} == {kept.snapshot_id, later.snapshot_id}
    (named,) = sdk.Sandbox.list_snapshots(name="first-state").next_items()
    assert named.snapshot_id == kept.snapshot_id
    for ref in (kept.snapshot_id, "first-state"):
        with sdk.Sandbox.create(ref) as earlier:
            assert earlier.files.read("state") == "first"
            assert earlier.commands.run("echo $FROM_BOX; pwd").stdout == "box\n/home/user\n"
    with pytest.raises(sdk.SandboxException):
        box.create_snapshot(mode="full")
    one, two = box.fork(count=2)
    one.files.write("state", "one")
    assert (one.files.read("state"), two.files.read("state"), box.files.read("state")) == ("one", "second", "second")
    assert own_snap.json("inspect", one.sandbox_id)[0]["forked_from"] == later.snapshot_id
    assert one.kill()
    assert two.kill()
    assert sdk.Sandbox.delete_snapshot(later.snapshot_id)
    assert not sdk.Sandbox.delete_snapshot(later.snapshot_id)
    assert sdk.Sandbox.delete_snapshot(kept.snapshot_id)
    with pytest.raises(sdk.SandboxException, match="404"):
        sdk.Sandbox.create("first-state")


def test_lists_and_times(box: Any, sdk: Any) -> None:
    info = box.get_info()
    assert (info.metadata, info.state, info.cpu_count) == ({"test": "tour"}, sdk.SandboxState.RUNNING, 2)
    box.set_timeout(1200)
    assert box.get_info().end_at - info.end_at > type(info.end_at - info.started_at)(minutes=10)
    with sdk.Sandbox.create(metadata={"other": "a b&c"}) as other:
        found = sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={"other": "a b&c"})).next_items()
        assert [one.sandbox_id for one in found] == [other.sandbox_id]
        pages = sdk.Sandbox.list(limit=1)
        ids = []
        while pages.has_next:
            ids += [one.sandbox_id for one in pages.next_items()]
        assert {other.sandbox_id, box.sandbox_id} <= set(ids)
        assert sdk.Sandbox.list(query=sdk.SandboxQuery(state=[sdk.SandboxState.PAUSED])).next_items() == []
    metrics = box.get_metrics()
    assert metrics[0].cpu_count == 2
    assert metrics[0].mem_total > 0
    assert (
        sdk.Sandbox.create(idempotency_key="same-key").sandbox_id
        == (again := sdk.Sandbox.create(idempotency_key="same-key")).sandbox_id
    )
    assert again.kill()
    assert not again.kill()


@pytest.mark.long  # without E2B: unit/daemon/test_services.py
def test_a_sandbox_ends_when_its_time_is_over(sdk: Any, own_snap: Snap) -> None:
    ends = sdk.Sandbox.create(timeout=2)
    sleeps = sdk.Sandbox.create(timeout=2, lifecycle={"on_timeout": "pause"})
    sleeps.files.write("kept", "kept")
    wait_until(lambda: not ends.is_running() and not sleeps.is_running(), "both have ended")
    with pytest.raises(sdk.SandboxNotFoundException):
        ends.get_info()
    assert own_snap.json("inspect", ends.sandbox_id)[0]["status"] == "stopped"
    assert sleeps.connect(timeout=60).files.read("kept") == "kept"
    assert sleeps.kill()


@pytest.mark.long  # what there is not: test_what_is_not_done_is_an_error_of_the_sdk
def test_a_sandbox_that_a_person_has_removed_is_not_there(sdk: Any, own_snap: Snap) -> None:
    """The SDK says of it what it says of one that was killed."""
    made = [sdk.Sandbox.create(timeout=300, metadata={"is": "gone"}) for _ in range(3)]
    made[0].files.write("kept", "kept")
    made[1].pause()
    for one in made[:2]:
        own_snap("rm", "--force", one.sandbox_id)
    made[2].kill()
    assert sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={"is": "gone"})).next_items() == []
    for box in made:
        for ask in (
            lambda box=box: box.files.read("kept"),
            lambda box=box: box.files.write("new", "new"),
            lambda box=box: box.files.list("/"),
            lambda box=box: box.files.watch_dir("/"),
            lambda box=box: box.commands.run("true"),
            lambda box=box: box.commands.list(),
            lambda box=box: box.pty.create(sdk.PtySize(24, 80)),
        ):
            with pytest.raises(sdk.SandboxNotRunningException):
                ask()
        assert not box.is_running()
        for manage in (box.get_info, box.connect, box.pause, lambda box=box: box.set_timeout(60), box.create_snapshot):
            with pytest.raises(sdk.SandboxNotFoundException):
                manage()
        assert not box.kill()


def test_ports(box: Any, server: Served, sdk: Any) -> None:
    serve = "mkdir -p www && cd www && echo hello > index.html && python3 -m http.server 8000 2>/dev/null"
    if box.commands.run("command -v python3 || true").stdout == "":
        serve = r"while :; do printf 'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello\n' | nc -l -p 8000; done"
    box.commands.run(serve, background=True, timeout=0)
    assert box.get_host(8000) == f"8000-{box.sandbox_id}.{server.env['E2B_DOMAIN']}"

    for way in ({"Host": box.get_host(8000)}, {"E2b_Sandbox_Id": box.sandbox_id, "E2b_Sandbox_Port": "8000"}):
        wait_until(lambda way=way: asked(server, "GET", "/", **way) == (200, b"hello\n"), f"it answers by {list(way)}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(server.address, headers={"Host": box.get_host(8001)}))
    assert refused.value.code == 502


def test_signed_urls(box: Any) -> None:
    box.files.write("shared", "shared")
    url = box.download_url("shared", use_signature_expiration=60)
    assert urllib.request.urlopen(url).read() == b"shared"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.replace("path=shared", "path=other"))
    assert refused.value.code == 401
    late = box.download_url("shared", use_signature_expiration=1)
    time.sleep(1.1)  # the signature's own time
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(late)


def test_templates(sdk: Any, own_snap: Snap, tmp_path: Path) -> None:
    (tmp_path / "app" / "deep").mkdir(parents=True)
    (tmp_path / "app" / "deep" / "part").write_text("part\n")
    (tmp_path / "app" / "main.sh").write_text("#!/bin/sh\necho main $SETTING\n")
    (tmp_path / "single").write_text("single\n")
    said: list[str] = []
    template = (
        sdk.Template(file_context_path=str(tmp_path))
        .from_base_image()
        .copy("app", "/srv/app", mode=0o755)
        .copy("single", "there/")
        .set_envs({"SETTING": "set"})
        .run_cmd("echo from $USER > made; id -un")
        .run_cmd("echo root > /etc/made", user="root")
        .set_workdir("/srv/app")
        .set_start_cmd("echo started > /tmp/started; exec sleep 1000", "test -e /tmp/started")
    )
    built = sdk.Template.build(
        template, "mine:v1", cpu_count=1, memory_mb=512, on_build_logs=lambda e: said.append(str(e))
    )
    assert any("user" in line for line in said)
    assert sdk.Template.exists("mine")
    assert not sdk.Template.exists("nobodys")
    assert [one.tag for one in sdk.Template.get_tags("mine")] == ["v1"]
    sdk.Template.assign_tags("mine:v1", "default")
    with sdk.Sandbox.create(f"mine:{built.build_id}") as made:
        assert made.get_info().template_id == built.template_id
    with sdk.Sandbox.create("mine") as made:
        told = made.commands.run(
            "./main.sh; pwd; cat /etc/made ~/made deep/part ~/there/single /tmp/started; stat -c %U main.sh"
        )
        assert told.stdout == "main set\n/srv/app\nroot\nfrom user\npart\nsingle\nstarted\nuser\n"
        info = made.get_info()
        assert (info.cpu_count, info.memory_mb, info.template_id) == (1, 512, built.template_id)
        assert [one.cmd for one in made.commands.list()] == ["/bin/bash"]
    sdk.Template.build(sdk.Template().from_template("mine:v1").run_cmd("echo more > more"), "more")
    with sdk.Sandbox.create("more") as made:
        assert made.commands.run("cat more deep/part").stdout == "more\npart\n"
    with pytest.raises(sdk.BuildException, match="exit status 3"):
        sdk.Template.build(sdk.Template().from_base_image().run_cmd("exit 3"), "broken")
    with pytest.raises(sdk.BuildException, match="no-such-image"):
        sdk.Template.build(sdk.Template().from_image("localhost:9/no-such-image"), "broken")
    with pytest.raises(sdk.SandboxException, match="404"):
        sdk.Sandbox.create("broken")
    sdk.Template.remove_tags("mine", "v1")
    with pytest.raises(sdk.SandboxException, match="404"):
        sdk.Sandbox.create("mine:v1")


def test_what_is_not_done_is_an_error_of_the_sdk(box: Any, sdk: Any) -> None:
    for options in (
        {"volume_mounts": {"/mnt": "volume"}},
        {"network": {"egress_proxy": {"address": "proxy.example:1080"}}},
        {"mcp": {"github": {}}},
    ):
        with pytest.raises(sdk.SandboxException, match="501"):
            sdk.Sandbox.create(**options)
    with pytest.raises(sdk.SandboxException, match="501"):
        box.update_network({"allow_internet_access": True})
    with pytest.raises(Exception, match="501"):
        sdk.Volume.create("volume")


def test_the_asynchronous_sdk(server: Served, sdk: Any) -> None:
    async def tour() -> None:
        box = await sdk.AsyncSandbox.create()
        events: list[str] = []
        await box.files.make_dir("watched")
        watcher = await box.files.watch_dir("watched", on_event=lambda one: events.append(one.name))
        await asyncio.gather(*(box.files.write(f"watched/{n}", str(n)) for n in range(5)))
        assert await asyncio.gather(*(box.files.read(f"watched/{n}") for n in range(5))) == list("01234")
        done = await asyncio.gather(*(box.commands.run(f"echo {n}") for n in range(5)))
        assert [one.stdout for one in done] == [f"{n}\n" for n in range(5)]
        deadline = time.monotonic() + 20
        while set(events) < set("01234"):
            assert time.monotonic() < deadline, events
            await asyncio.sleep(0.05)
        await watcher.stop()
        assert await box.kill()

    asyncio.run(tour())


def asked(server: Served, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    """Status and body of a request by hand. `headers`: with _ for -."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.address + path, data=body or None, headers=given, method=method)
    try:
        with urllib.request.urlopen(request) as answered:
            return answered.status, answered.read()
    except urllib.error.HTTPError as exc:
        data = exc.read()
        return exc.code, json.loads(data) if data.startswith(b"{") else data


def test_keys_and_tokens(box: Any, sdk: Any, server: Served) -> None:
    for key in ("", "e2b_" + "0" * 40, server.key[:-1], server.key + "x"):
        with pytest.raises(sdk.AuthenticationException):
            sdk.Sandbox.create(api_key=key or "x")
    inside = {"E2b_Sandbox_Id": box.sandbox_id, "Content_Type": "application/json"}
    token = box._envd_access_token
    with sdk.Sandbox.create() as other:
        for wrong in (
            {},
            {"X_Access_Token": ""},
            {"X_Access_Token": other._envd_access_token},
            {"X_API_Key": server.key},
        ):
            for method, path in (
                ("POST", "/process.Process/List"),
                ("GET", "/files?path=/etc/passwd"),
                ("GET", "/metrics"),
                ("GET", "/envs"),
            ):
                assert asked(server, method, path, b"{}" if method == "POST" else b"", **inside, **wrong)[0] == 401
    assert asked(server, "POST", "/process.Process/List", b"{}", **inside, X_Access_Token=token)[0] == 200
    assert asked(server, "GET", "/health", **inside) == (204, b"")
    assert json.loads(asked(server, "GET", "/envs", **inside, X_Access_Token=token)[1]) == {"FROM_BOX": "box"}
    assert json.loads(asked(server, "GET", "/metrics", **inside, X_Access_Token=token)[1])["cpu_count"] == 2


def test_requests_that_nobody_should_make(box: Any, server: Served, own_snap: Snap) -> None:
    """Each has an answer that is no 500, and the server goes on."""
    inside = {"E2b_Sandbox_Id": box.sandbox_id, "X_Access_Token": box._envd_access_token}
    rpc = {**inside, "Content_Type": "application/json"}
    stream = {**inside, "Content_Type": "application/connect+json"}
    key = {"X_API_Key": server.key}
    one = f"/sandboxes/{box.sandbox_id}"

    def framed(message: bytes, flags: int = 0, length: int | None = None) -> bytes:
        return bytes([flags]) + (len(message) if length is None else length).to_bytes(4, "big") + message

    unknown = {**inside, "E2b_Sandbox_Id": "0" * 32}
    for status, method, path, body, headers in (
        (502, "POST", "/process.Process/List", b"{}", {**rpc, "E2b_Sandbox_Id": "0" * 32}),
        (502, "GET", "/health", b"", unknown),
        (502, "GET", "/files?path=x", b"", {**unknown, "E2b_Sandbox_Id": "../../etc"}),
        (400, "GET", "/files", b"", inside),
        (400, "GET", "/files?path=a%00b", b"", inside),
        (404, "GET", "/files?path=gone", b"", inside),
        (401, "GET", "/files?path=gone&username=nobody-here", b"", inside),
        (401, "GET", "/files?path=x&signature=v1_wrong", b"", {}),
        (404, "PUT", "/files?path=x", b"x", inside),
        (400, "POST", "/files", b"x", inside),
        (400, "POST", "/files?path=x", b"no multipart", {**inside, "Content_Type": "multipart/form-data; boundary=b"}),
        (400, "POST", "/files?path=x", b"no multipart", {**inside, "Content_Type": "multipart/form-data"}),
        (400, "POST", "/files?path=x", b"no gzip", {**inside, "Content_Encoding": "gzip"}),
        (400, "POST", "/files?path=x", b"x", {**inside, "Content_Encoding": "br"}),
        (400, "POST", "/files?path=/etc", b"x", inside),
        (501, "POST", "/files?path=x", b"x", {**inside, "X_Metadata_A": "b"}),
        (415, "POST", "/process.Process/List", b"{}", {**inside, "Content_Type": "application/proto"}),
        (400, "POST", "/process.Process/List", b"{", rpc),
        (400, "POST", "/process.Process/List", b"[" * 100_000, rpc),
        (413, "POST", "/process.Process/List", b" " * (9 << 20), rpc),
        (400, "POST", "/process.Process/SendSignal", b'{"process":{"pid":"x"}}', rpc),
        (501, "POST", "/process.Process/SendSignal", b'{"process":{"pid":1},"signal":"SIGNAL_HUP"}', rpc),
        (404, "POST", "/process.Process/SendSignal", b'{"process":{"pid":1},"signal":"SIGNAL_SIGKILL"}', rpc),
        (404, "POST", "/process.Process/SendInput", b'{"process":{"pid":7},"input":{"stdin":"eA=="}}', rpc),
        (400, "POST", "/process.Process/SendInput", b'{"process":{"pid":7},"input":{"stdin":"***"}}', rpc),
        (404, "POST", "/process.Process/Nothing", b"{}", rpc),
        (413, "POST", "/process.Process/Start", framed(b"{}", length=1 << 31), stream),
        (501, "POST", "/process.Process/Start", framed(b"{}", flags=1), stream),
        (400, "POST", "/process.Process/Start", b"\0\0", stream),
        (400, "POST", "/filesystem.Filesystem/Stat", b'{"path":5}', rpc),
        (404, "POST", "/filesystem.Filesystem/Stat", b'{"path":"/gone/gone"}', rpc),
        (404, "POST", "/filesystem.Filesystem/GetWatcherEvents", b'{"watcherId":"x"}', rpc),
        (400, "POST", "/filesystem.Filesystem/ListDir", b'{"path":"/","depth":"deep"}', rpc),
        (401, "GET", "/sandboxes", b"", {}),
        (404, "GET", f"/sandboxes/{'0' * 32}", b"", key),
        (501, "DELETE", "/sandboxes/..%2F..%2Fetc", b"", key),
        (400, "POST", "/sandboxes", b"[]", key),
        (400, "POST", "/sandboxes", b'{"timeout":-1}', key),
        (400, "POST", "/sandboxes", b'{"metadata":{"a":1}}', key),
        (400, "POST", "/sandboxes", b'{"envVars":{"A=B":"x"}}', key),
        (400, "POST", "/sandboxes", b'{"templateID":"../up"}', key),
        (413, "POST", "/sandboxes", b" " * (2 << 20), key),
        (400, "POST", f"{one}/timeout", b"{}", key),
        (400, "POST", f"{one}/fork", b'{"count":1000}', key),
        (400, "GET", "/v2/sandboxes?limit=x", b"", key),
        (400, "GET", "/v2/sandboxes?startedAfter=x", b"", key),
        (404, "DELETE", "/templates/gone", b"", key),
        (400, "POST", "/v3/templates", b'{"name":"a b"}', key),
        (404, "GET", "/templates/x/builds/y/status", b"", key),
        (400, "GET", "/templates/x/files/..", b"", key),
        (401, "PUT", f"/templates/uploads/{'0' * 64}?signature=x", b"x", {}),
        (501, "GET", "/volumes", b"", key),
        (502, "GET", "/", b"", {"Host": f"80-{'0' * 32}.localhost"}),
        (400, "GET", "/", b"", {"Host": f"99999-{box.sandbox_id}.localhost"}),
    ):
        found = asked(server, method, path, body, **headers)
        assert found[0] == status, (method, path, body[:60], found)
        assert found[0] == 415 or found[1]["message"], (method, path, found)
    assert box.commands.run("echo on").stdout == "on\n"


def test_a_client_that_goes_away(box: Any, server: Served) -> None:
    """An upload that is cut off leaves the old file, and nobody waits for a stream that nobody reads."""
    box.files.write("kept", "old")
    host, _, port = server.address.removeprefix("http://").partition(":")
    head = (
        f"POST /files?path=kept HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\n"
        f"X-Access-Token: {box._envd_access_token}\r\nContent-Type: application/octet-stream\r\n"
        "Content-Length: 1000000\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"x" * 500_000)
    message = b'{"process":{"cmd":"/bin/bash","args":["-c","echo begun; sleep 1000"]}}'
    start = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {box.sandbox_id}\r\n"
        f"X-Access-Token: {box._envd_access_token}\r\nContent-Type: application/connect+json\r\n"
        f"Content-Length: {len(message) + 5}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(start.encode() + b"\0" + len(message).to_bytes(4, "big") + message)
        while b"YmVndW4K" not in connection.recv(4096):
            pass
    (process,) = box.commands.list()  # it goes on
    assert box.commands.kill(process.pid)
    assert box.files.read("kept") == "old"
    box.files.write("kept", "new")
    assert box.files.read("kept") == "new"


@pytest.mark.long  # a daemon that dies while a file is put: test_cut_off_writes.py
def test_a_server_that_was_killed_goes_on(own_snap: Snap, tmp_path: Path, sdk: Any) -> None:
    with served(own_snap, tmp_path, "--network", "none") as first, environment(first.env):
        box = sdk.Sandbox.create(timeout=600, metadata={"kept": "yes"}, envs={"A": "b"})
        command = box.commands.run("echo begun; read -r line; echo $line", background=True, stdin=True, timeout=0)
        assert next(iter(command))[0] == "begun\n"
        box.files.write("file", "kept")
    with served(own_snap, tmp_path, "--network", "none", "--rm") as second, environment(second.env):
        same = sdk.Sandbox.connect(box.sandbox_id)
        assert same.get_info().metadata == {"kept": "yes"}
        assert same.files.read("file") == "kept"
        followed = same.commands.connect(command.pid)
        same.commands.send_stdin(command.pid, "again\n")
        assert followed.wait().stdout == "again\n"
        assert same.commands.run("echo $A").stdout == "b\n"
        assert same.kill()
    assert box.sandbox_id not in [one["id"] for one in own_snap.json("ls")]


@pytest.mark.long  # its calls are those of the tests above
def test_the_program_of_the_page_prints_what_it_shows(own_snap: Snap, server: Served) -> None:
    shown = re.search(r"\$ python3 fixing\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    program = ROOT / "docs" / "examples" / "integrations" / "fixing.py"
    env = {**own_snap.env, **server.env}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == (shown[1], "")
    assert own_snap("cat", "working:/home/user/app/config").stdout == "ok\n"


@pytest.mark.long
def test_the_sdk_for_javascript(server: Served) -> None:
    sdk = from_npm("e2b", JAVASCRIPT, "e2b/package.json").parent
    program = Path(__file__).with_name("programs") / "e2b_tour.mjs"
    env = {"PATH": os.environ["PATH"], **server.env}
    done = subprocess.run([node(), program, sdk], env=env, capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr[-3000:]


@pytest.mark.long  # of any sandbox: tests/leftovers.py, at the end of each module's daemon
def test_nothing_is_left(own_snap: Snap, tmp_path: Path, sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setitem(own_snap.env, "TMPDIR", str(folder))
    with served(own_snap, tmp_path, "--network", "none") as running, environment(running.env):
        box = sdk.Sandbox.create(metadata={"left": "over"})
        assert list(folder.glob("snapshotd-e2b-*"))
        box.pty.create(sdk.PtySize(24, 80)).disconnect()
        box.files.watch_dir(".")
        assert box.kill()
        assert sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={"left": "over"})).next_items() == []
    assert not list(folder.iterdir())
    assert own_snap.json("inspect", box.sandbox_id)[0]["status"] == "stopped"
