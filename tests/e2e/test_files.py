"""Files of sandboxes from outside: each write is a step of its own, and reads see what is there now."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, Snapshot, Snapshotd
from snapshotd.errors import Conflict, NotFound, OutOfSpace, UsageError
from tests import long, way
from tests.e2e.support import Snap, wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs"
ODD = "new\nline\udcff *"


@pytest.fixture
def client(snap: Snap) -> Snapshotd:
    return Snapshotd(state_dir=snap.state_dir, autostart=False)


@pytest.fixture
def box(client: Snapshotd, runtime: str) -> Iterator[Sandbox]:
    made = Sandbox.create(runtime=runtime, client=client)
    yield made
    made.remove(force=True)


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_each_write_is_a_step_that_a_rewind_takes_back(box: Sandbox, client: Snapshotd) -> None:
    files = box.files
    first = files.write("deep/er/" + ODD, "one").snapshot
    assert (first.tool.name, first.tool.status) == ("write", "done")
    assert first.tool.arguments == {"path": f"/workspace/deep/er/{ODD}", "bytes": 3}
    assert box.head().id == first.id
    box.exec("chown 5:6 deep/er/*; chmod 750 deep/er/*", check=True)
    files.write("deep/er/" + ODD, b"two")
    there = files.stat("deep/er/" + ODD)
    assert (there.name, there.kind, there.size, there.mode, there.uid, there.gid) == (ODD, "file", 3, "0750", 5, 6)
    looked = box.exec("stat -c '%u %g %a' deep deep/er/*", check=True).stdout
    assert looked.splitlines() == ["0 0 755", "5 6 750"], "the sandbox sees the same"
    tree = "/workspace/a"
    for work, name, changed in (
        (lambda: files.write_many({"a/x": "1", "/etc/y": b"2"}).snapshot, "write", {tree, f"{tree}/x", "/etc/y"}),
        (lambda: files.make_dir("a/b/c"), "make_dir", {f"{tree}/b", f"{tree}/b/c"}),
        (lambda: files.rename("a/x", "a/b/x"), "rename", {f"{tree}/x", f"{tree}/b/x"}),
        (lambda: files.write("whose", "x", user="65534").snapshot, "write", {"/workspace/whose"}),
        (lambda: files.remove("a"), "remove", {tree, f"{tree}/b", f"{tree}/b/c", f"{tree}/b/x"}),
    ):
        taken = work()
        assert taken.tool.name == name
        assert {change.path for change in box.head().diff()} == changed
        assert box.head().id == taken.id
    assert [one.info.seq for one in box.snapshots()] == list(range(10))
    assert box.exec("stat -c %u:%g whose").stdout == "65534:65534\n"
    assert not files.exists("a")
    assert files.exists("deep")

    old = box.snapshots()[1]
    assert old.files.read_text("deep/er/" + ODD) == "one"
    assert [(item.name, item.kind) for item in old.files.list()] == [("deep", "directory")]
    old.tag(f"old-{box.id[:8]}")
    for ref in (old.id, f"old-{box.id[:8]}"):
        with pytest.raises(UsageError, match="snapshot"):
            client.write_file(ref, "x", "what is past does not change")
    box.rewind(old)
    assert files.read("deep/er/" + ODD) == b"one"
    box.stop()
    assert [item.name for item in files.list("deep/er")] == [ODD], "of its head, and nothing is started for that"
    assert box.info.status == "stopped"
    files.write("deep/er/" + ODD, "three")
    assert box.info.status == "running"
    assert box.exec("cat deep/er/*").stdout == "three"


def test_a_fork_of_an_earlier_snapshot_has_its_files_from_the_beginning(box: Sandbox, client: Snapshotd) -> None:
    earlier = box.files.write("state", "one").snapshot
    box.files.write("state", "two")
    (fork,) = Snapshot.get(earlier.id, client=client).fork()
    try:
        assert fork.files.read_text("state") == "one"
        assert fork.files.stat("state").size == 3
        box.files.write("later", "x")
        assert not fork.files.exists("later")
    finally:
        fork.remove(force=True)


def test_what_runs_is_seen_and_written_beside(box: Sandbox, snap: Snap) -> None:
    wait = "echo now > live; while [ ! -e go ]; do sleep 0.05; done; cat go"
    running = snap.follow("exec", box.id, "--", "sh", "-c", wait)
    wait_until(lambda: box.files.exists("live") and box.files.read_text("live") == "now\n", "it is seen")
    assert not box.head().files.exists("live")
    with pytest.raises(UsageError if way.WAY else Conflict, match="of the image" if way.WAY else "is not empty"):
        box.files.rename("/workspace", "/usr")
    box.files.write("go", "and on")
    out, _ = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, "and on")
    assert [one.info.tool.name for one in box.snapshots()] == ["start", "write", "exec"]


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_nothing_leads_out_of_a_sandbox_or_blocks(box: Sandbox) -> None:
    files = box.files
    box.exec("ln -s /proc/1/root/etc up; ln -s /proc/self/environ env; mkfifo fifo; ln -s /dev/zero zero", check=True)
    before = len(box.snapshots())
    for path in ("up/hostname", "env", "fifo", "zero", "/proc/self/mem", "/dev/null"):
        with pytest.raises(UsageError):
            files.read(path)
        with pytest.raises(UsageError):
            files.write(path, "mine")
    for path in ("/proc", "/dev/null", "/"):
        with pytest.raises(UsageError):
            files.remove(path)
    with pytest.raises(NotFound):
        files.remove("nothing")
    with pytest.raises(UsageError):
        files.write("../etc/passwd", "")
    with pytest.raises(UsageError, match="stranger"):
        files.write("x", "", user="stranger")
    if box.info.runtime == "docker":
        with pytest.raises(UsageError, match="mounted"):
            files.write("/etc/hosts", "mine")
    assert {item.name for item in files.list()} == {"env", "fifo", "up", "zero"}
    assert {item.name: item.target for item in files.list()}["up"] == "/proc/1/root/etc"
    assert [item.name for item in files.list("/proc")] == []
    assert len(box.snapshots()) == before, "what fails leaves nothing"


class Breaking(io.RawIOBase):
    """Gives some of a file, looks at the other side, and fails."""

    def __init__(self, data: bytes, box: Sandbox) -> None:
        super().__init__()
        self._data, self._box = data, box

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._data:
            data, self._data = self._data, b""
            return data
        assert self._box.files.read("f") == b"old"
        raise ZeroDivisionError


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_a_write_that_is_cut_off_leaves_the_old_file(snap: Snap, client: Snapshotd, runtime: str) -> None:
    box = Sandbox.create(runtime=runtime, disk=64 << 20, client=client)
    box.files.write("f", "old")
    with pytest.raises(ZeroDivisionError):
        box.files.write("f", Breaking(bytes(3 << 20), box))  # type: ignore[arg-type]
    with pytest.raises(OutOfSpace):
        box.files.write("f", bytes(80 << 20))
    box.exec("true")  # belongs to it only when the daemon has noticed the end of the other
    assert box.files.read("f") == b"old"
    assert [item.name for item in box.files.list()] == ["f"]
    assert [one.info.tool.name for one in box.snapshots()] == ["start", "write", "exec"]

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("new", "f"):
            item = tarfile.TarInfo(name)
            item.size = 1 << 20
            archive.addfile(item, io.BytesIO(b"n" * item.size))
    with pytest.raises(ZeroDivisionError):
        client.write_archive(box.id, "/workspace", Breaking(tar.getvalue()[: 3 << 19], box))  # type: ignore[arg-type]
    wait_until(lambda: len(box.snapshots()) == 4, "what was there already is recorded")
    call = box.head().info.tool
    assert (call.name, call.status) == ("write", "interrupted")
    assert call.arguments == {"path": "/workspace", "paths": ["/workspace/new"], "files": 1, "bytes": 1 << 20}
    assert box.files.read("f") == b"old"
    box.remove(force=True)


@pytest.mark.runc
@pytest.mark.parametrize(
    "name",
    [
        "files",
        "best_of_8",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("background", "tree_search", "fifty", "follow")),
    ],
)
def test_the_page_shows_what_its_example_prints(snap: Snap, tmp_path: Path, name: str) -> None:
    page = (DOCS / "client.md").read_text()
    env = {**snap.env, "PYTHONPATH": str(DOCS.parent)}
    words = [sys.executable, str(DOCS / f"examples/client/{name}.py")]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=snap.timeout_s)
    assert done.stderr == ""
    assert f"$ python3 {name}.py\n{done.stdout}```" in page
    assert (DOCS / f"examples/client/{name}.py").read_text() in page
    if name == "files":
        assert (tmp_path / "copy/app.sh").read_text() == "echo one > out.txt\n"


@pytest.mark.long  # programs of the page: the test before
@pytest.mark.runc
def test_the_program_beside_those_of_other_services_runs(snap: Snap, tmp_path: Path) -> None:
    env = {**snap.env, "PYTHONPATH": str(DOCS.parent)}
    example = DOCS / "examples/client/hello.py"
    done = subprocess.run(
        [sys.executable, str(example)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=snap.timeout_s
    )
    assert (done.stdout, done.stderr) == ("hello\n" + "print('hello')\n" * 2, "")
    assert example.read_text() in (DOCS / "client.md").read_text()


@pytest.mark.runc
def test_steps_go_on_beside_a_slow_write(snap: Snap, client: Snapshotd) -> None:
    box = Sandbox.create(runtime="runc", client=client)

    parts = [b"one ", b"two", b""]

    class Slow(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            box.exec("echo $$ > beside", check=True)
            return parts.pop(0)

    taken = box.files.write("f", Slow()).snapshot  # type: ignore[arg-type]
    assert box.exec("cat f").stdout == "one two"
    made = [one for one in box.snapshots() if one.info.tool.name == "exec"]
    assert not any(one.files.exists("f") for one in made[:3])
    assert Snapshot(client, taken).files.read("f") == b"one two"
    assert box.rewind(made[0]).info.tool.name == "rewind", "nothing holds the sandbox any more"
    assert not box.files.exists("f")

    names, data = {item.name for item in box.files.list("/usr/bin")}, io.BytesIO()

    def write(piece: bytes) -> None:
        data.write(piece)
        if data.tell() < 8 << 20:
            box.exec("echo $$ >> /usr/bin/beside", check=True)

    client.read_archive(box.id, "/usr/bin", write)
    data.seek(0)
    with tarfile.open(fileobj=data) as archive:
        assert names <= {item.name.removeprefix("bin/") for item in archive}
    box.remove(force=True)


@pytest.mark.long  # small ones: the first test
def test_large_files_pass_in_constant_memory(client: Snapshotd, runtime: str) -> None:
    """Of the daemon and of this process, both ways: no more of it than of a small one."""
    box = Sandbox.create(runtime=runtime, client=client)
    size = long.size(192 << 20, 2 << 30)
    left = size

    class Zeros(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            nonlocal left
            count = min(size, left)
            left -= count
            return bytes(count)

    def peak(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    pids = (client.version().pid, os.getpid())
    box.files.write("small", bytes(2 << 20))
    before = [peak(pid) for pid in pids]
    done = box.files.write("large", Zeros())  # type: ignore[arg-type]
    assert done.bytes == size
    assert sum(map(len, box.files.stream("large"))) == size
    for pid, earlier in zip(pids, before, strict=True):
        assert peak(pid) - earlier < 64 << 20
    box.remove(force=True)


def run(snap: Snap, *args: str, data: bytes = b"") -> bytes:
    """A command line with something on its standard input."""
    words = [sys.executable, "-m", "snapshotd", *args]
    return subprocess.run(
        words, env=snap.env, input=data, capture_output=True, check=True, timeout=snap.timeout_s
    ).stdout


def test_cp_both_ways(box: Sandbox, snap: Snap, tmp_path: Path) -> None:
    here = tmp_path / "tree"
    (here / "sub").mkdir(parents=True)
    (here / "sub/run.sh").write_text("#!/bin/sh\necho ran\n")
    (here / "sub/run.sh").chmod(0o755)
    (here / ODD).write_text("odd")
    (here / "link").symlink_to("sub/run.sh")
    taken = snap.json("cp", here, f"{box.id}:")
    assert (taken["tool"]["name"], taken["tool"]["arguments"]["files"]) == ("write", 3)
    assert box.exec("tree/link").stdout == "ran\n"
    assert box.exec("stat -c '%u %a' tree/sub tree/sub/run.sh").stdout == "0 755\n0 755\n"
    assert "write" in snap("cp", f"{here}/.", f"{box.id}:/srv/made").stderr
    assert {item.name for item in box.files.list("/srv/made")} == {ODD, "link", "sub"}
    snap("cp", here / "sub/run.sh", f"{box.id}:tree")
    snap("cp", here / "sub/run.sh", f"{box.id}:/srv/other")
    assert box.files.read("tree/run.sh") == box.files.read("/srv/other") == (here / "sub/run.sh").read_bytes()

    box.exec("ln tree/sub/run.sh tree/sub/same; mkfifo tree/fifo; truncate -s 1T tree/sparse; chmod 4755 tree/run.sh")
    head = box.head().id
    box.exec("rm -r tree/sub")
    assert "fifo" in snap("cp", f"{head}:tree", tmp_path / "out").stderr
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == sorted([ODD, "link", "sub", "run.sh", "sparse"])
    assert (out / "sub/run.sh").stat().st_mode & 0o7777 == 0o755
    assert (out / "run.sh").stat().st_mode & 0o7777 == 0o755, "nobody else's rights come along"
    assert (out / "sub/same").stat().st_ino == (out / "sub/run.sh").stat().st_ino
    assert (out / "sparse").stat().st_size == 1 << 40
    assert os.readlink(out / "link") == "sub/run.sh"
    assert snap.json("cp", f"{box.id}:tree", out)["directories"] == 0, (
        "live, below what is there, and not counted itself"
    )
    assert sorted(os.listdir(out / "tree")) == sorted([ODD, "link", "run.sh", "sparse"])
    snap("cp", f"{box.id}:tree/{ODD}", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "odd"
    assert run(snap, "cp", f"{box.id}:tree/{ODD}", "/proc/self/fd/1") == b"odd"
    (tmp_path / "other").symlink_to("file")
    assert "is no regular file" in snap("cp", f"{box.id}:/srv/other", tmp_path, code=2).stderr
    os.mkfifo(tmp_path / "fifo")
    assert "is a fifo" in snap("cp", tmp_path / "fifo", f"{box.id}:", code=2).stderr

    packed = run(snap, "cp", f"{box.id}:/srv/made", "-")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert "made/sub/run.sh" in archive.getnames()
    run(snap, "cp", "-", f"{box.id}:/again", data=packed)
    assert box.files.read("/again/made/sub/run.sh") == (here / "sub/run.sh").read_bytes()
    for words in (("-", "-"), (str(here), "there"), (str(here), f"{box.id}:/srv/other"), (f"{box.id}:nothing", "x")):
        assert snap("cp", *words, code=None).returncode in (2, 4), words
    assert "cut off" in snap("cp", "-", f"{box.id}:/x", code=2).stderr
