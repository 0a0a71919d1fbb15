"""`snapshotd serve --e2b` with the unmodified SDK for Python, a real daemon and real sandboxes."""

from __future__ import annotations

import io
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2b_rig import Served, environment, served
from tests.e2e.support import Snap, wait_until

pytestmark = pytest.mark.runc


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


def test_a_terminal(box: Any, sdk: Any) -> None:
    shown = bytearray()
    terminal = box.pty.create(sdk.PtySize(rows=30, cols=90), cwd="/tmp", envs={"PS1": "> "})
    reading = threading.Thread(target=lambda: terminal.wait(on_pty=shown.extend))
    reading.start()
    box.pty.send_stdin(terminal.pid, b"stty size; tty; pwd\n")
    wait_until(lambda: b"30 90" in shown and b"/dev/pts/" in shown and b"/tmp" in shown, "the terminal answers")
    box.pty.resize(terminal.pid, sdk.PtySize(rows=40, cols=100))
    box.pty.stream_input(terminal.pid, [b"stty ", "size\n"])
    wait_until(lambda: b"40 100" in shown, "the terminal has another size")
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

    entry = files.get_info("notes.txt")
    assert (entry.size, entry.owner, entry.group, entry.permissions) == (4, "user", "user", "-rw-r--r--")
    assert (entry.type, entry.mode) == (sdk.FileType.FILE, 0o644)
    box.commands.run("ln -s notes.txt link; ln -s nowhere dangling")
    link = files.get_info("link")
    assert (link.type, link.symlink_target, link.path) == (sdk.FileType.SYMLINK, "/home/user/notes.txt", "/home/user/link")
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
    with pytest.raises(sdk.SandboxException):
        sdk.Sandbox.pause(box.sandbox_id, mode="full")
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


def test_ports(box: Any, server: Served, sdk: Any) -> None:
    serve = "mkdir -p www && cd www && echo hello > index.html && python3 -m http.server 8000 2>/dev/null"
    if box.commands.run("command -v python3 || true").stdout == "":
        serve = r"while :; do printf 'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello\n' | nc -l -p 8000; done"
    box.commands.run(serve, background=True, timeout=0)
    assert box.get_host(8000) == f"8000-{box.sandbox_id}.{server.env['E2B_DOMAIN']}"

    def asked(headers: dict[str, str]) -> bytes | None:
        try:
            return bytes(urllib.request.urlopen(urllib.request.Request(server.address, headers=headers)).read())
        except (urllib.error.URLError, ConnectionError):
            return None

    wait_until(lambda: asked({"Host": box.get_host(8000)}) == b"hello\n", "the server answers by its host")
    wait_until(
        lambda: asked({"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "8000"}) == b"hello\n", "by headers"
    )
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
