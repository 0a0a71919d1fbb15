"""What `write_tree` writes is read back the same by our own reader, GNU tar, bsdtar and Python's tarfile."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import socket
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.errors import DataLoss, LimitExceeded, UsageError
from snapshotd.formats.ingest import TarLimits, ingest_tar
from snapshotd.formats.tar_reader import TarReader
from snapshotd.formats.tar_writer import ArchiveMarks, write_tree
from snapshotd.kernel import files
from snapshotd.trees.base import Child, Entry
from snapshotd.trees.stack_view import StackView
from tests.archives import archive, entry, pax_record, raw_header

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="owners and device nodes")
ACL = bytes.fromhex("0200000001000700ffffffff02000600e803000004000500ffffffff10000700ffffffff20000000ffffffff")
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
Manifest = dict[bytes, tuple[Any, ...]]


def manifest(root: Path) -> Manifest:
    """Everything about a tree, by path; hard links as the first of their names. Iterative, through descriptors: for
    paths of any length."""
    found: Manifest = {}
    inodes: dict[int, bytes] = {}
    top = os.open(root, files.DIR_FLAGS)
    found[b""] = _facts(top, os.fstat(top))
    stack = [(b"", top, sorted(map(os.fsencode, os.listdir(top))))]
    while stack:
        prefix, fd, names = stack[-1]
        if not names:
            stack.pop()
            os.close(fd)
            continue
        name = names.pop(0)
        path = prefix + name
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            deeper = files.open_dir(fd, name)
            found[path] = _facts(deeper, status)
            stack.append((path + b"/", deeper, sorted(map(os.fsencode, os.listdir(deeper)))))
        elif status.st_nlink > 1 and inodes.setdefault(status.st_ino, path) != path:
            found[path] = ("link", inodes[status.st_ino])
        else:
            held = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=fd)
            content = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(status.st_mode) else _content(fd, name, status)
            found[path] = (*_facts(held, status), content)
            os.close(held)
    return found


def _facts(fd: int, status: os.stat_result) -> tuple[Any, ...]:
    attributes = {} if stat.S_ISLNK(status.st_mode) else files.read_xattrs(fd)
    return (
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_mtime_ns,
        status.st_rdev,
        tuple(sorted(attributes.items())),
    )


def _content(dir_fd: int, name: bytes, status: os.stat_result) -> tuple[int, str, bool]:
    if not stat.S_ISREG(status.st_mode):
        return 0, "", False
    digest = hashlib.sha256()
    fd = os.open(name, os.O_RDONLY, dir_fd=dir_fd)
    for offset, length in _data(fd, status.st_size):
        digest.update(b"%d %d " % (offset, length) + os.pread(fd, length, offset))
    os.close(fd)
    return status.st_size, digest.hexdigest(), status.st_blocks * 512 < status.st_size


def _data(fd: int, size: int) -> Iterator[tuple[int, int]]:
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end - start


def make_variety(root: Path) -> None:
    """One nasty entry for each thing that a file system can hold."""
    root.mkdir(exist_ok=True)
    raw = os.fsencode(root) + b"/"
    for name in (
        b"caf\xe9",
        b"new\nline",
        b"-rf",
        b" lead",
        b"trail ",
        b"back\\slash",
        b"x" * 255,
        b"\xff" * 120,
        "ü".encode() * 60,
        b".wh.name",
        b"a=b",
        b"%25",
        b"PaxHeader",
        b"...",
    ):
        Path(os.fsdecode(raw + name)).write_bytes(name)
    (root / "empty").touch()
    (root / "exact").write_bytes(b"x" * 512)
    (root / "big").write_bytes(os.urandom((1 << 20) + 77))
    (root / "d" / "e").mkdir(parents=True)
    (root / "d" / "link").symlink_to("../nowhere")
    (root / "d" / "long").symlink_to("t" * 4000)
    os.symlink(b"\xff\xfe" * 90, raw + b"d/raw")
    (root / "d" / "in").write_text("in")
    os.link(root / "d" / "in", root / "another")
    os.link(root / "d" / "link", root / "d" / "link2", follow_symlinks=False)
    os.link(root / "big", os.fsdecode(raw + b"d/e/" + b"\xe9" * 200))
    os.mkfifo(root / "pipe", 0o640)
    with open(root / "sparse", "wb") as f:
        os.pwrite(f.fileno(), b"middle", 5 << 20)
        os.ftruncate(f.fileno(), 9 << 20)
    with open(root / "hole", "wb") as f:
        os.ftruncate(f.fileno(), 1 << 40)
    with open(root / ("sparse-" + "n" * 200), "wb") as f:
        for at in range(0, 4 << 20, 1 << 16):
            os.pwrite(f.fileno(), b"%d" % at, at)
    if os.geteuid() == 0:
        _root_only(root)
    for name in (b"d/in", b"caf\xe9"):
        os.chmod(raw + name, 0o4751)
    (root / "d" / "e").chmod(0o1770)
    for number, name in enumerate(sorted(os.listdir(raw))):
        os.utime(raw + name, ns=(0, 1_600_000_000_123_456_789 + number), follow_symlinks=False)
    os.utime(root / "empty", ns=(0, -1_500_000_001))
    os.utime(root / "exact", ns=(0, 13_000_000_000 * 10**9 + 1))
    os.utime(root / "d" / "e", ns=(0, -2_000_000_000 * 10**9))
    os.utime(root, ns=(0, 7))


def _root_only(root: Path) -> None:
    os.chown(root / "empty", 65535, 1234)
    os.chown(root / "d" / "link", 12, 13, follow_symlinks=False)
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(root / "disk", 0o600 | stat.S_IFBLK, os.makedev(4095, 1048575))
    os.link(root / "disk", root / "disk2")
    os.setxattr(root / "exact", "security.capability", CAPABILITY)
    os.setxattr(root / "d", "system.posix_acl_default", ACL)
    os.setxattr(root / "exact", "system.posix_acl_access", ACL)
    for name, value in (
        (b"user.plain", b"v"),
        (b"user.a=b", b"1\n2\0"),
        (b"user.100%", b""),
        (b"user.\n\xff", b"\xff" * 700),
    ):
        os.setxattr(root / "big", name, value)
    os.setxattr(root, "user.top", b"top")


def written(root: Path, marks: ArchiveMarks = ArchiveMarks.NONE) -> tuple[bytes, tuple[str, ...]]:
    out = io.BytesIO()
    fd = os.open(root, files.DIR_FLAGS)
    try:
        with StackView([fd]) as view:
            warnings = write_tree(view, out.write, marks=marks)
    finally:
        os.close(fd)
    return out.getvalue(), warnings


def ingested(data: bytes, target: Path, *, overlay: bool = False) -> tuple[str, ...]:
    target.mkdir()
    fd = os.open(target, files.DIR_FLAGS)
    try:
        return ingest_tar(io.BytesIO(data), fd, oci_whiteouts=False, overlay_marks=overlay).warnings
    finally:
        os.close(fd)


@pytest.fixture
def variety(tmp_path: Path) -> Path:
    make_variety(tmp_path / "variety")
    return tmp_path / "variety"


def same_but_for(one: Manifest, other: Manifest, *left_out: bytes) -> None:
    """Compare with a readable message."""
    for path in one.keys() | other.keys():
        if path not in left_out:
            assert one.get(path) == other.get(path), path


# -- round trips -------------------------------------------------------------------------------------------------------


def test_our_own_reader_gets_everything_back(variety: Path, tmp_path: Path) -> None:
    data, warnings = written(variety)
    assert warnings == ()
    assert ingested(data, tmp_path / "back") == ()
    same_but_for(manifest(variety), manifest(tmp_path / "back"))


def test_one_tree_gives_the_same_bytes(variety: Path, tmp_path: Path) -> None:
    first, _ = written(variety)
    ingested(first, tmp_path / "back")
    assert written(tmp_path / "back")[0] == first


def _unpack(argv: list[str], data: bytes, target: Path) -> str:
    target.mkdir()
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    result = subprocess.run(argv, input=data, cwd=target, capture_output=True, env=environment, timeout=60, check=False)
    assert result.returncode == 0, result.stderr.decode("utf-8", "backslashreplace")
    return result.stderr.decode("utf-8", "backslashreplace")


@ROOT_ONLY
def test_gnu_tar_gets_everything_back(variety: Path, tmp_path: Path) -> None:
    """But for attributes with names that it would take for escapes; of those it says so."""
    data, _ = written(variety)
    argv = [
        "tar",
        "-x",
        "-p",
        "--same-owner",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=*",
        "--delay-directory-restore",
    ]
    said = _unpack(argv, data, tmp_path / "back")
    assert "LIBARCHIVE.xattr" in said
    back = manifest(tmp_path / "back")
    same_but_for(manifest(variety), back, b"big")
    assert dict(back[b"big"][5]) == {b"user.plain": b"v"}


@ROOT_ONLY
@pytest.mark.skipif(shutil.which("bsdtar") is None, reason="bsdtar is not installed")
def test_bsdtar_gets_everything_back(variety: Path, tmp_path: Path) -> None:
    """But for what libarchive 3.6 reads differently: fractions of negative times, access lists (only from records of
    its own), `./`."""
    data, _ = written(variety)
    _unpack(["bsdtar", "-x", "-p", "--xattrs", "--acls", "--numeric-owner", "-f", "-"], data, tmp_path / "back")
    expected, back = manifest(variety), manifest(tmp_path / "back")
    same_but_for(expected, back, b"", b"empty", b"d", b"exact")
    assert back[b"empty"][:3] == expected[b"empty"][:3]
    assert back[b"exact"][:5] == expected[b"exact"][:5]
    assert (b"security.capability", CAPABILITY) in back[b"exact"][5]


def test_python_reads_it(variety: Path) -> None:
    data, _ = written(variety)
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        names = {b"" if info.name == "." else os.fsencode(info.name): info for info in tar.getmembers()}
        expected = manifest(variety)
        assert names.keys() == expected.keys()
        for name, info in names.items():
            facts = expected[name]
            if facts[0] == "link":
                assert os.fsencode(info.linkname) == facts[1]
            elif info.isreg() and info.size < 16 << 20:
                member = tar.extractfile(info)
                assert member is not None
                assert member.read() == (variety / os.fsdecode(name)).read_bytes()


def test_paths_beyond_path_max_and_deep_trees(tmp_path: Path) -> None:
    root = tmp_path / "deep"
    root.mkdir()
    fd = os.open(root, files.DIR_FLAGS)
    for level in range(300):
        name = b"%03d" % level + b"\xe9" * (40 if level % 2 else 150)
        os.mkdir(name, dir_fd=fd)
        deeper = files.open_dir(fd, name)
        os.close(fd)
        fd = deeper
        if level % 50 == 0:
            with open(os.open(b"f", os.O_CREAT | os.O_WRONLY, dir_fd=fd), "wb") as f:
                f.write(name)
            os.link(b"f", b"g", src_dir_fd=fd, dst_dir_fd=fd)
        os.utime(fd, ns=(0, level))
    os.close(fd)
    try:
        data, warnings = written(root)
        assert warnings == ()
        ingested(data, tmp_path / "back")
        same_but_for(manifest(root), manifest(tmp_path / "back"))
        assert max(map(len, manifest(tmp_path / "back"))) > 25_000
    finally:
        parent = os.open(tmp_path, files.DIR_FLAGS)
        for name in ("deep", "back"):
            files.remove_tree(parent, name)
        os.close(parent)


def test_zeros_that_are_data_stay_data_where_a_file_says_where_its_holes_are(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/short").write_bytes(bytes(100))
    with open(tmp_path / "root/f", "wb") as f:
        os.pwrite(f.fileno(), bytes(64 << 10), 1 << 20)
        os.ftruncate(f.fileno(), 4 << 20)
    ingested(written(tmp_path / "root")[0], tmp_path / "back")
    same_but_for(manifest(tmp_path / "root"), manifest(tmp_path / "back"))


names = st.binary(min_size=1, max_size=130).filter(lambda name: not {0, 47} & set(name) and name not in (b".", b".."))
values = st.tuples(st.binary(max_size=1500), st.integers(-(1 << 61), 14_000_000_000 * 10**9), st.integers(0, 0o7777))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.dictionaries(names, values, max_size=8))
def test_any_names_contents_and_times(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[bytes, tuple[bytes, int, int]]
) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "root").mkdir()
    for name, (content, mtime_ns, mode) in entries.items():
        path = os.fsencode(base / "root") + b"/" + name
        Path(os.fsdecode(path)).write_bytes(content)
        os.chmod(path, mode)
        os.utime(path, ns=(0, mtime_ns))
    data, warnings = written(base / "root")
    assert warnings == ingested(data, base / "back") == ()
    same_but_for(manifest(base / "root"), manifest(base / "back"))


# -- what the format cannot hold, marks --------------------------------------------------------------------------------


def test_a_socket_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path / "root")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("control\x1b")
    data, warnings = written(tmp_path / "root")
    assert warnings == ("control\\x1b was left out, because it is a socket, which an archive cannot hold",)
    assert [member.path for member in TarReader(io.BytesIO(data))] == [b"./"]


class _Deletions(StackView):
    """A directory as a layer: its character devices 0:0 are entries."""

    def children(self, directory: Any) -> Any:
        found, hidden = self._lookup.scan(directory)
        return tuple(sorted([*found, *(self._mark(directory, name) for name in hidden)], key=lambda child: child.name))

    def _mark(self, directory: Any, name: bytes) -> Any:
        fd = self._lookup.handles.fd(directory.sources[0])
        return Child(name, Entry.of(os.stat(name, dir_fd=fd, follow_symlinks=False)), directory.sources[0])


def _as_layer(root: Path, marks: ArchiveMarks) -> tuple[bytes, tuple[str, ...]]:
    out = io.BytesIO()
    fd = os.open(root, files.DIR_FLAGS)
    with _Deletions([fd]) as view:
        warnings = write_tree(view, out.write, marks=marks)
    os.close(fd)
    return out.getvalue(), warnings


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    root = tmp_path / "layer"
    (root / "d").mkdir(parents=True)
    (root / "d" / ".wh.plain").write_text("a file that is called so")
    os.mknod(root / "d" / "gone", stat.S_IFCHR, 0)
    os.mknod(root / ("g" * 255), stat.S_IFCHR, 0)
    (root / "new").write_text("new")
    return root


@ROOT_ONLY
def test_deletions_in_an_image_layer(layer: Path) -> None:
    data, warnings = _as_layer(layer, ArchiveMarks.OCI)
    assert [(member.path, member.size) for member in TarReader(io.BytesIO(data))] == [
        (b"./", 0),
        (b"d/", 0),
        (b"d/.wh.gone", 0),
        (b"new", 3),
    ]
    assert len(warnings) == 2
    assert "would mean a deletion" in warnings[0]
    assert "is not deleted" in warnings[1]


@ROOT_ONLY
def test_deletions_in_a_layer_of_ours_come_back_as_they_are(layer: Path, tmp_path: Path) -> None:
    data, warnings = _as_layer(layer, ArchiveMarks.OVERLAY)
    assert warnings == ()
    assert ingested(data, tmp_path / "back", overlay=True) == ()
    for path in ("d/gone", "g" * 255):
        status = os.lstat(tmp_path / "back" / path)
        assert (stat.S_ISCHR(status.st_mode), status.st_rdev) == (True, 0)
    assert (tmp_path / "back/d/.wh.plain").read_text() == "a file that is called so"
    with pytest.raises(UsageError, match="0:0"):
        ingested(data, tmp_path / "other")


@ROOT_ONLY
def test_a_whole_tree_has_no_deletions(layer: Path) -> None:
    data, warnings = _as_layer(layer, ArchiveMarks.NONE)
    assert len(warnings) == 2
    assert [member.path for member in TarReader(io.BytesIO(data))] == [b"./", b"d/", b"d/.wh.plain", b"new"]


def test_a_file_in_too_many_pieces_gets_its_short_holes_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.formats.tar_writer.MAX_EXTENTS", 20)
    root = tmp_path / "root"
    root.mkdir()
    with open(root / "f", "wb") as f:
        for at in range(0, 100 << 13, 1 << 13):
            os.pwrite(f.fileno(), b"x", at)
        os.pwrite(f.fileno(), b"far", 64 << 20)
    with open(root / "g", "wb") as f:
        for at in range(0, 100 << 22, 1 << 22):
            os.pwrite(f.fileno(), b"x", at)
    data, warnings = written(root)
    assert warnings == ("g was left out, because its data are in more than 20 pieces",)
    ingested(data, tmp_path / "back")
    assert (tmp_path / "back/f").read_bytes() == (root / "f").read_bytes()
    assert (tmp_path / "back/f").stat().st_blocks * 512 < 2 << 20


def test_a_shorter_file_is_not_padded(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 1000)

    class Shrinking(StackView):
        def open_child(self, child: Any) -> int:
            os.truncate(tmp_path / "f", 900)
            return super().open_child(child)

    fd = os.open(tmp_path, files.DIR_FLAGS)
    with Shrinking([fd]) as view, pytest.raises(DataLoss, match="f has 900 bytes where 1000"):
        write_tree(view, io.BytesIO().write)
    os.close(fd)


# -- hostile sparse files and attributes -------------------------------------------------------------------------------


def sparse_member(lines: bytes, data: bytes = b"", realsize: bytes = b"100", **more: bytes) -> bytes:
    records = {
        b"GNU.sparse.major": b"1",
        b"GNU.sparse.minor": b"0",
        b"GNU.sparse.name": b"s",
        b"GNU.sparse.realsize": realsize,
    }
    records.update({key.encode(): value for key, value in more.items()})
    content = lines.ljust(-(-len(lines) // 512) * 512, b"\0") + data
    return raw_header(b"x", b"".join(pax_record(key, value) for key, value in records.items())) + archive(
        entry("x", data=content)
    )


@pytest.mark.parametrize(
    ("lines", "data", "realsize"),
    [
        (b"1\n0\n101\n", b"x" * 101, b"100"),
        (b"1\n99\n2\n", b"xx", b"100"),
        (b"2\n10\n5\n12\n5\n", b"x" * 10, b"100"),
        (b"2\n50\n1\n10\n1\n", b"xx", b"100"),
        (b"1\n0\n10\n", b"x" * 9, b"100"),
        (b"1\n0\n10\n", b"x" * 600, b"100"),
        (b"x\n", b"", b"100"),
        (b"-1\n", b"", b"100"),
        (b"", b"", b"100"),
        (b"3\n0\n1\n", b"x", b"100"),
        (b"9" * 600, b"", b"100"),
        (b"1\n9223372036854775807\n9223372036854775807\n", b"", b"9223372036854775807"),
        (b"0\n", b"", b"9223372036854775808"),
        (b"0\n", b"", b"-1"),
        (b"0\n", b"", b"x"),
        (b"1\n\n\n", b"", b"100"),
    ],
)
def test_impossible_maps_are_refused(tmp_path: Path, lines: bytes, data: bytes, realsize: bytes) -> None:
    with pytest.raises(UsageError):
        ingested(sparse_member(lines, data, realsize), tmp_path / "t")


def test_a_map_of_a_million_lines_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="pieces"):
        ingested(sparse_member(b"1048577\n"), tmp_path / "t")


def test_holes_take_no_time_and_count_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    fd = os.open(tmp_path / "t", files.DIR_FLAGS)
    data = sparse_member(b"2\n0\n3\n1099511627776\n3\n", b"onetwo", b"%d" % (1 << 41))
    report = ingest_tar(io.BytesIO(data), fd, oci_whiteouts=False, limits=TarLimits(bytes=6))
    os.close(fd)
    assert (report.bytes, (tmp_path / "t/s").stat().st_size) == (6, 1 << 41)
    with open(tmp_path / "t/s", "rb") as f:
        assert os.pread(f.fileno(), 5, 1 << 40) == b"two\0\0"


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"LIBARCHIVE.xattr.user.x", b"!"), (b"LIBARCHIVE.xattr.user.%00", b"YQ"), (b"SCHILY.xattr.user.\0", b"1")],
)
def test_damaged_attributes_are_refused(tmp_path: Path, key: bytes, value: bytes) -> None:
    with pytest.raises(UsageError, match="attribute"):
        ingested(raw_header(b"x", pax_record(key, value)) + archive(entry("f")), tmp_path / "t")


@pytest.mark.parametrize("name", [b"trusted.overlay.opaque", b"trusted%2Eoverlay%2Eredirect", b"user%2eoverlay.opaque"])
def test_overlay_attributes_are_stripped_however_they_are_spelt(tmp_path: Path, name: bytes) -> None:
    warnings = ingested(
        raw_header(b"x", pax_record(b"LIBARCHIVE.xattr." + name, b"eQ")) + archive(entry("f")), tmp_path / "t"
    )
    assert os.listxattr(tmp_path / "t/f") == []
    assert "was left out" in warnings[0]


def test_one_path_cannot_make_more_directories_than_an_archive_may_have_members(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    fd = os.open(tmp_path / "t", files.DIR_FLAGS)
    with pytest.raises(LimitExceeded, match="directories"):
        ingest_tar(
            io.BytesIO(archive(entry("d/" * 3000 + "f"))), fd, oci_whiteouts=False, limits=TarLimits(members=1000)
        )
    os.close(fd)
    parent = os.open(tmp_path, files.DIR_FLAGS)
    files.remove_tree(parent, "t")
    os.close(parent)
