"""Processes that make packs of plain files beside the writer: real ones, also killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from snapshotd.daemon.children import StatePlaces
from snapshotd.errors import InternalError, ServiceAwayError, Unavailable
from snapshotd.kernel import processes
from snapshotd.kernel.processes import stat_fields
from snapshotd.repo.base import PlainFile, Roots, Tree, TreeEntry
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.repo.writing import packer, packers
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.local import LocalStore
from snapshotd.trees import archive
from snapshotd.types import BlobID, Kind, TreeID
from tests import forked
from tests.faulty_store import FaultyStore

KIB, MIB = 1 << 10, 1 << 20


class Rig:
    """A repository whose writer has help, in the middle of a large step; and a folder of files."""

    def __init__(self, directory: Path) -> None:
        self.places = StatePlaces(directory, directory, "", f"file://{directory}/repo/store")
        self.places.repo_dir.mkdir(parents=True)
        self.folder = directory / "files"
        self.folder.mkdir()
        self._rng = random.Random(1)
        self.store = LocalStore(self.places.repo_dir / "store")
        self.writer = self.open(self.places.command("pack"))
        self.large_step()

    def open(self, packer_command: list[str] | None) -> PackRepository:
        return PackRepository(
            self.store, self.places.repo_dir / "index.db", load_key(self.places.repo_dir), packer_command=packer_command
        )

    def large_step(self) -> None:
        """Help is there for what comes behind the first 8 MiB."""
        for _ in range(9 * MIB // (250 * KIB) + 1):
            self.writer.save_bytes(self._rng.randbytes(250 * KIB))

    def make(self, name: bytes, size: int) -> bytes:
        data = self._rng.randbytes(size // 2)
        data += b"all the same " * (size // 13 + 1)
        (self.folder / os.fsdecode(name)).write_bytes(data[:size])
        return data[:size]

    def some(self, count: int = 60) -> dict[bytes, bytes]:
        """New files of 40 KiB and their contents."""
        names = [b"%d" % self._rng.randrange(1 << 60) for _ in range(count)]
        return {name: self.make(name, 40 * KIB) for name in names}

    def listed(self, *names: bytes) -> list[PlainFile]:
        files = []
        for name in names:
            st = os.lstat(self.folder / os.fsdecode(name))
            files.append(PlainFile(name, st.st_dev, st.st_ino, st.st_size))
        return files

    def begin(self, files: list[PlainFile]) -> Callable[[], list[BlobID | None]]:
        """Waits until there is help."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            wait_until(self.ready)
            answer = self.writer.save_files(fd, files)
        finally:
            os.close(fd)
        assert answer is not None, "it is worth it"
        return answer

    def ready(self) -> bool:
        assert self.writer._packers is not None
        return self.writer._packers.ready()

    def begin_stopped(self, files: list[PlainFile]) -> Callable[[], list[BlobID | None]]:
        """They have been asked, and have not begun. For no more files than are on the way to them at a time."""
        wait_until(self.ready)
        for pid in helpers():
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(stat_fields(pid)[0] == b"T" for pid in helpers()))  # not at once on a busy machine
        return self.begin(files)

    def save(self, files: list[PlainFile]) -> list[BlobID | None]:
        return self.begin(files)()

    def ids(self, contents: dict[bytes, bytes]) -> list[BlobID]:
        return [BlobID(self.writer.reader.identity.content(data).hex()) for data in contents.values()]

    def holds(self, *contents: bytes) -> None:
        """A reader of its own finds them, and nothing is wrong with the repository."""
        reader = PackReader(self.store, self.places.repo_dir / "index.db", load_key(self.places.repo_dir))
        for data in contents:
            assert b"".join(reader.load(BlobID(reader.identity.content(data).hex()))) == data
        reader.close()

    def healthy(self) -> None:
        """Closes the writer."""
        self.writer.close()
        maintenance = PackMaintenance(self.store, self.places.repo_dir / "index.db", load_key(self.places.repo_dir))
        checked = maintenance.check(Roots({}, {}, {}), read_data=True, progress=lambda _: None)
        assert checked.faults == ()
        assert maintenance.repair(lambda _: None).actions == ()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def fork(argv: list[str], *, stdin: int, stdout: int) -> Any:
    """As `subprocess.Popen`, and in a tenth of its time if it is one of our processes."""
    if argv[:2] != [sys.executable, "-m"] or not forked.can_be_forked(os.environ):
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout)
    with open(os.devnull, "wb") as nothing:
        fds = {0: stdin, 1: nothing.fileno()}
        return forked.start(argv[3:], fds, env=os.environ, cwd=os.getcwd(), module=argv[2])


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Its processes are forked (tests/forked.py); with the parameter "spawned" each is an interpreter of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # two of them, wherever this runs
    if getattr(request, "param", "") != "spawned":
        monkeypatch.setattr(packers, "subprocess", SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL))
    rig = Rig(tmp_path / "state")
    yield rig
    rig.writer.close()
    assert helpers() == []


SPAWNED = pytest.mark.parametrize("rig", ["spawned"], indirect=True)


def helpers() -> list[int]:
    """Those of this process's writer that run now; a daemon that other tests left running may have some, too."""
    found = []
    for pid in processes.descendants(os.getpid()):
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # others of this process's children come and go
            parent = int(processes.stat_fields(pid)[1])
            own = parent == os.getpid() or b"/forked.py\0" in Path(f"/proc/{parent}/cmdline").read_bytes()
            if own and b"\0pack\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def kill_helpers() -> None:
    for pid in helpers():
        os.kill(pid, signal.SIGKILL)


@SPAWNED
def test_contents_of_any_size_come_back(rig: Rig) -> None:
    sizes = (1, 100, 4096, 256 * KIB, 256 * KIB + 1, 3 * MIB, packer.FILE_MAX_BYTES)
    names = (b"a", b"\xff\xfe", b"new\nline", b"n" * 255, b"-rf", b"\xc3\xa9", b"large")
    contents = {name: rig.make(name, size) for name, size in zip(names, sizes, strict=True)} | rig.some(200)
    too_long = {b"too long": rig.make(b"too long", packer.FILE_MAX_BYTES + 1)}
    answers = rig.save(rig.listed(*contents, *too_long))
    assert answers == [*rig.ids(contents), None]
    assert len(helpers()) == 2
    rig.writer.flush()
    rig.holds(*contents.values())
    rig.healthy()


def test_the_longest_names_fit_into_a_request(rig: Rig) -> None:
    contents = {
        name: rig.make(name, 2000)
        for name in (b"%03d" % number + b"\xff" * 252 for number in range(3 * packer.FILES_MAX))
    }
    assert rig.save(rig.listed(*contents)) == rig.ids(contents)
    rig.writer.flush()
    rig.holds(*contents.values())
    rig.healthy()


def test_what_is_no_plain_file_is_left_to_the_writer(rig: Rig) -> None:
    contents = rig.some()
    plain = next(iter(contents))
    for name in (b"attributed", b"holes", b"replaced", b"longer", b"gone"):
        rig.make(name, 40 * KIB)
    os.setxattr(rig.folder / "attributed", "user.x", b"1")
    with open(rig.folder / "holes", "r+b") as file:
        file.truncate(MIB)
    (rig.folder / "link").symlink_to(os.fsdecode(plain))
    (rig.folder / "folder").mkdir()
    os.mkfifo(rig.folder / "fifo")
    odd = rig.listed(b"attributed", b"holes", b"replaced", b"longer", b"gone", b"link", b"folder", b"fifo")
    (rig.folder / "new").write_bytes(bytes(40 * KIB))
    (rig.folder / "new").rename(rig.folder / "replaced")
    with open(rig.folder / "longer", "ab") as file:
        file.write(b"more")
    (rig.folder / "gone").unlink()
    assert rig.save([*odd, *rig.listed(*contents)]) == [*[None] * len(odd), *rig.ids(contents)]
    rig.writer.flush()
    rig.healthy()


def test_what_is_there_is_not_stored_again(rig: Rig) -> None:
    contents = rig.some()
    rig.save(rig.listed(*contents))
    rig.writer.flush()
    before = rig.writer.saved.packed_bytes
    rig.large_step()
    assert rig.save(rig.listed(*contents)) == rig.ids(contents)
    rig.writer.flush()
    assert rig.writer.saved.packed_bytes - before < 11 * MIB, "the beginning of the large step, and nothing else"
    rig.healthy()


def test_one_content_from_several_sides_at_once(rig: Rig) -> None:
    """Queued by the writer, and under many names, so that each process gets it: it is stored more than once and found
    once."""
    contents = rig.some(100)
    same = b"twice" * 8 * KIB
    rig.writer.save_bytes(same)
    copies = {b"copy %d" % number: same for number in range(20)}
    for name, data in copies.items():
        (rig.folder / os.fsdecode(name)).write_bytes(data)
    waiting = rig.begin(rig.listed(*contents, *copies))
    for data in contents.values():
        rig.writer.save_bytes(data)
    assert waiting() == rig.ids(contents | copies)
    rig.writer.flush()
    rig.holds(same, *contents.values())
    rig.healthy()


def test_little_is_not_worth_it(rig: Rig) -> None:
    rig.make(b"one", 40 * KIB)
    fd = os.open(rig.folder, os.O_RDONLY | os.O_DIRECTORY)
    assert rig.writer.save_files(fd, rig.listed(b"one")) is None
    many = rig.listed(*rig.some())
    rig.writer.flush()
    assert rig.writer.save_files(fd, many) is None, "the step is small up to now"
    rig.writer.close()
    rig.writer = rig.open(None)
    rig.large_step()
    assert rig.writer.save_files(fd, many) is None, "nobody helps"
    os.close(fd)
    assert helpers() == []


def test_processes_that_end_with_nothing_in_their_hands_are_no_loss(rig: Rig) -> None:
    first = rig.some()
    rig.save(rig.listed(*first))
    rig.writer.flush()
    rig.large_step()
    second = rig.some(200)
    waiting = rig.begin_stopped(rig.listed(*second))
    kill_helpers()
    assert waiting() == [None] * 200
    rig.writer.flush()
    third = rig.some()
    rig.large_step()
    assert rig.save(rig.listed(*third)) == rig.ids(third), "there are others now"
    rig.writer.flush()
    rig.holds(*first.values(), *third.values())
    rig.healthy()


def test_one_that_ends_before_it_answers_is_replaced_when_that_was_heard(rig: Rig) -> None:
    """More is saved meanwhile: whoever waits for the first files is still told that they are left to the writer."""
    first, second = rig.some(), rig.some()
    waiting = rig.begin_stopped(rig.listed(*first))
    kill_helpers()
    wait_until(lambda: helpers() == [])
    rig.ready()
    assert waiting() == [None] * len(first)
    for data in first.values():
        rig.writer.save_bytes(data)
    assert rig.save(rig.listed(*second)) == rig.ids(second), "there are others now"
    rig.writer.flush()
    rig.holds(*first.values(), *second.values())
    rig.healthy()


@pytest.mark.parametrize("at", ["flush", "files"])
def test_a_killed_process_that_held_something_is_told_and_the_job_can_be_done_again(rig: Rig, at: str) -> None:
    contents = rig.some()
    rig.save(rig.listed(*contents))
    kill_helpers()
    more = rig.listed(*rig.some(200))
    with pytest.raises(InternalError, match="try again"):
        rig.save(more) if at == "files" else rig.writer.flush()
    rig.large_step()
    assert rig.save(rig.listed(*contents)) == rig.ids(contents)
    rig.writer.flush()
    rig.holds(*contents.values())
    rig.healthy()


def test_a_disk_that_fails_in_one_of_them_ends_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of theirs may have more than some bytes: EFBIG, which is no full disk."""
    command = StatePlaces.command
    monkeypatch.setattr(StatePlaces, "command", lambda self, role: ["prlimit", "--fsize=100000", *command(self, role)])
    rig = Rig(tmp_path / "state")
    contents = rig.some()
    rig.save(rig.listed(*contents))
    for _ in range(2):
        with pytest.raises((InternalError, OSError)):
            rig.writer.flush()
    rig.writer.close()
    rig.writer = rig.open(None)
    rig.large_step()
    rig.writer.flush()
    assert not any(rig.writer.contains(one) for one in rig.ids(contents))
    rig.healthy()


def test_a_bucket_that_does_not_answer_one_of_them_is_unavailable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(operation: str, _key: str) -> None:
        if operation == "put":
            raise ServiceAwayError("the bucket does not answer")

    def fail(_: socket.socket, error: Exception) -> None:
        raise error

    monkeypatch.setattr(packer, "_fail", fail)
    key = load_key(rig.places.repo_dir)
    reader = PackReader(FaultyStore(rig.store, gone), rig.places.repo_dir / "index.db", key)
    files = [[file.name.hex(), file.inode, file.size] for file in rig.listed(*rig.some(1))]
    fd = os.open(rig.folder, os.O_RDONLY | os.O_DIRECTORY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        request = {"device": os.fstat(fd).st_dev, "folders": [files]}
        socket.send_fds(ours, [json.dumps(request).encode()], [fd])
        os.close(fd)
        ours.send(b'{"flush": true}')
        with pytest.raises(Unavailable, match="the bucket does not answer"):
            packer._serve(theirs, packer.Packer(reader))
    reader.close()


def test_one_that_nobody_asks_ends_unless_it_holds_something(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "_IDLE_S", 0.01)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one = packer.Packer(PackReader(rig.store, rig.places.repo_dir / "index.db", load_key(rig.places.repo_dir)))
    serving = threading.Thread(target=packer._serve, args=(its, one))
    with ours, its:
        fd = os.open(rig.folder, os.O_RDONLY | os.O_DIRECTORY)
        (file,) = rig.listed(next(iter(rig.some(1))))
        request = b'{"device": %d, "folders": [[["%s", %d, %d]]]}' % (
            file.device,
            file.name.hex().encode(),
            file.inode,
            file.size,
        )
        socket.send_fds(ours, [request], [fd])
        os.close(fd)
        serving.start()
        assert b'"objects"' in ours.recv(packer.MESSAGE_MAX_BYTES)
        serving.join(0.2)
        assert serving.is_alive(), "what it holds would be lost"
        ours.send(b'{"flush": true}')
        assert b'"packs"' in ours.recv(packer.MESSAGE_MAX_BYTES)
        serving.join(30)
        assert not serving.is_alive()


def test_one_whose_writer_is_killed_ends_without_a_word(rig: Rig) -> None:
    """Also in the middle of a request: what it says is not read any more."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, subprocess.Popen(rig.places.command("pack"), stdin=its.fileno(), stderr=subprocess.PIPE) as process:
        its.close()
        assert ours.recv(packer.MESSAGE_MAX_BYTES) == b'{"ready": true}'
        ours.send(b'{"flush": true}')
        assert select.select([ours], [], [], 60)[0], "it has answered"
        ours.send(b'{"flush": true}')
        ours.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_a_tree_is_the_same_with_and_without_help(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MOST_FILES", 7)
    monkeypatch.setattr(archive, "_MOST_UNFINISHED", 3)
    monkeypatch.setattr(packers, "FOLDERS_MAX", 2)
    rng = random.Random(5)
    layer = tmp_path / "layer"
    for number in range(120):
        place = layer / f"d{number % 12}" / f"e{number % 5}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{number}").write_bytes(rng.randbytes(rng.randrange(0, 300 * KIB)))
        os.utime(place / f"f{number}", ns=(0, rng.randrange(1 << 60)))
        (place / f"f{number}").chmod(rng.randrange(0o1000))
    os.setxattr(layer / "d0/e0/f0", "user.x", b"1")
    os.link(layer / "d1/e1/f1", layer / "d2/e2/linked")
    (layer / "d3/link").symlink_to("e3")
    fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
    wait_until(rig.ready)
    helped = archive.apply(rig.writer, fd, None, salt=b"s")
    rig.writer.flush()
    assert len(helpers()) == 2
    rig.holds(*[path.read_bytes() for path in layer.rglob("*") if path.is_file() and path.stat().st_size])
    alone = PackRepository(LocalStore(tmp_path / "alone"), tmp_path / "alone.db", load_key(rig.places.repo_dir))
    assert archive.apply(alone, fd, None, salt=b"s") == helped
    alone.close()
    os.close(fd)
    rig.healthy()


def test_small_directories_go_together(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to another process costs as much as some files."""
    layer = tmp_path / "layer"
    for number in range(100):
        for name in ("a", "b", "c"):
            place = layer / f"d{number}"
            place.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"%d %s" % (number, name.encode()) * 50)
    requests: list[list[int]] = []
    send = packers._Peer.send

    def counted(self: packers._Peer, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if "folders" in request:
            assert len(fds) == len(request["folders"])
            requests.append([len(files) for files in request["folders"]])
        send(self, request, fds)

    monkeypatch.setattr(packers._Peer, "send", counted)
    wait_until(rig.ready)
    open_before = len(os.listdir("/proc/self/fd"))
    fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
    archive.apply(rig.writer, fd, None, salt=b"s")
    os.close(fd)
    rig.writer.flush()
    assert len(os.listdir("/proc/self/fd")) <= open_before, "garbage of other tests may have closed some meanwhile"
    assert sum(map(sum, requests)) == 300
    assert len(requests) <= 20, "sixteen directories each, but for the last ones"
    rig.holds(*[path.read_bytes() for path in layer.rglob("*") if path.is_file()])
    rig.healthy()


def test_few_entries_are_in_memory_while_files_are_saved(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "_MOST_UNFINISHED_ENTRIES", 100)
    most = 0
    finish = archive._Archiver._finish

    def watched(self: archive._Archiver, directory: archive._Directory) -> TreeID:
        nonlocal most
        most = max(most, sum(len(one.result) for one in [directory, *self._unfinished._directories]))
        return finish(self, directory)

    monkeypatch.setattr(archive._Archiver, "_finish", watched)
    layer = tmp_path / "layer"
    for number in range(40):
        (layer / f"d{number}").mkdir(parents=True)
        (layer / f"d{number}" / "file").write_bytes(b"%d" % number)
        for link in range(30):
            (layer / f"d{number}" / f"l{link}").symlink_to("file")
    wait_until(rig.ready)
    fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY)
    archive.apply(rig.writer, fd, None, salt=b"s")
    os.close(fd)
    assert 60 <= most <= 160, "some directories at once, and not all forty"


def test_what_waits_for_more_is_given_up_with_the_rest(rig: Rig) -> None:
    """Directories whose files were not sent yet are not kept open."""
    contents = rig.some(3)
    wait_until(rig.ready)
    open_before = len(os.listdir("/proc/self/fd"))
    waiting = rig.begin(rig.listed(*contents))
    assert len(os.listdir("/proc/self/fd")) > open_before, "nothing was sent"
    rig.writer.give_up()
    assert len(os.listdir("/proc/self/fd")) < open_before, "the processes are gone as well"
    with pytest.raises(InternalError, match="given up"):
        waiting()


def test_an_archive_that_is_given_up_half_way_leaves_a_writer_that_works(rig: Rig) -> None:
    """Files were given to others, and nobody waits for them."""
    contents = rig.some(300)
    rig.begin(rig.listed(*contents))
    tree = rig.writer.save_tree(Tree(TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 0), ()))
    rig.writer.flush()
    rig.holds(*contents.values())
    assert rig.writer.load_tree(tree).entries == ()
    rig.healthy()


def test_given_up_and_killed(rig: Rig) -> None:
    """Nobody waits for the files, and whoever had them is gone: there is nothing to flush."""
    rig.begin_stopped(rig.listed(*rig.some(300)))
    kill_helpers()
    rig.writer.flush()
    assert helpers() == []
    rig.healthy()


@SPAWNED
def test_while_they_start_the_writer_does_the_work(rig: Rig) -> None:
    contents = rig.some()
    fd = os.open(rig.folder, os.O_RDONLY | os.O_DIRECTORY)
    assert rig.writer.save_files(fd, rig.listed(*contents)) is None, "they start now"
    wait_until(lambda: len(helpers()) == 2)
    os.close(fd)
    assert rig.save(rig.listed(*contents)) == rig.ids(contents)
    rig.writer.flush()
    rig.healthy()


@pytest.mark.parametrize("command", [["/no/such/command"], ["false"]])
def test_without_processes_that_start_it_goes_on_alone(
    rig: Rig, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.writer.close()
    rig.writer = rig.open(command)
    rig.large_step()
    many = rig.listed(*rig.some())
    fd = os.open(rig.folder, os.O_RDONLY | os.O_DIRECTORY)
    started: list[int] = []
    start = packers._Peer.__init__

    def counted(self: packers._Peer, number: int, argv: list[str]) -> None:
        started.append(number)
        start(self, number, argv)

    monkeypatch.setattr(packers._Peer, "__init__", counted)
    wait_until(lambda: rig.writer.save_files(fd, many) is None and len(started) >= packers._MOST_FAILED)
    for _ in range(20):
        assert rig.writer.save_files(fd, many) is None
    assert len(started) <= packers._MOST_FAILED + 1
    os.close(fd)
    rig.writer.flush()
    rig.healthy()


@SPAWNED
def test_one_that_is_killed_while_it_starts_is_started_again(rig: Rig) -> None:
    contents = rig.some()
    fd = os.open(rig.folder, os.O_RDONLY | os.O_DIRECTORY)
    assert rig.writer.save_files(fd, rig.listed(*contents)) is None
    os.close(fd)
    wait_until(lambda: len(helpers()) == 2)
    kill_helpers()
    assert rig.save(rig.listed(*contents)) == rig.ids(contents)
    rig.writer.flush()
    rig.healthy()


def test_the_processes_end_with_the_writer(rig: Rig) -> None:
    rig.save(rig.listed(*rig.some()))
    assert len(helpers()) == 2
    rig.writer.close()
    assert helpers() == []
