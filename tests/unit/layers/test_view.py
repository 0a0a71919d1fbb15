"""View, diff and materialise on plain directories: what needs no overlay marks, and so no root."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotd.kernel.files import DIR_FLAGS, open_dir, remove_tree
from snapshotd.trees.base import ChangeKind
from snapshotd.trees.diff import count, diff
from snapshotd.trees.lookup import MAX_OPEN_DIRS
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import FileChanges, Kind


@contextmanager
def view_of(*dirs: Path) -> Iterator[View]:
    fds = [os.open(path, DIR_FLAGS) for path in dirs]
    try:
        with StackView(fds) as view:
            yield view
    finally:
        for fd in fds:
            os.close(fd)


def layer(root: Path, **files: str) -> Path:
    root.mkdir()
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def make_deep(root: Path, depth: int, name: bytes = b"d" * 100) -> None:
    """A chain of directories with a file at its end, deeper than any path can say."""
    fd = os.open(root, DIR_FLAGS)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        deeper = open_dir(fd, name)
        os.close(fd)
        fd = deeper
    os.close(os.open(b"end", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
    os.close(fd)


def test_newest_layer_wins_and_directories_merge(tmp_path: Path) -> None:
    new = layer(tmp_path / "new", f="new", d__n="1", x__in="dir")
    old = layer(tmp_path / "old", f="old", d__o="2", x="a file that the directory hides")
    with view_of(new, old) as view:
        assert [name for name, _ in view.list(b"")] == [b"d", b"f", b"x"]
        assert [name for name, _ in view.list(b"/d//")] == [b"n", b"o"]
        assert [path for path, _ in view.walk()] == [b"d", b"d/n", b"d/o", b"f", b"x", b"x/in"]
        with open(view.open(b"f")) as f:
            assert f.read() == "new"


@pytest.mark.parametrize("path", [b"no", b"d/no", b".", b"..", b"d/..", b"d/../f", b"a\0b", b"x" * 300])
def test_names_that_do_not_exist(tmp_path: Path, path: bytes) -> None:
    with view_of(layer(tmp_path / "l", f="x", d__f="x")) as view, pytest.raises(FileNotFoundError):
        view.lstat(path)


def test_components_that_are_no_directories(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", f="x", d__f="x")
    (root / "link").symlink_to("d")
    with view_of(root) as view:
        for path in (b"f/x", b"link/f"):
            with pytest.raises(NotADirectoryError):
                view.lstat(path)
        assert view.readlink(b"link") == b"d"


def test_open_refuses_what_is_not_a_regular_file(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", d__f="x")
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to("/etc/passwd")
    with view_of(root) as view:
        for path, code in ((b"fifo", errno.EINVAL), (b"link", errno.ELOOP), (b"d", errno.EISDIR), (b"", errno.EISDIR)):
            with pytest.raises(OSError) as caught:
                view.open(path)
            assert caught.value.errno == code


def test_deeper_than_a_path_and_wider_than_the_descriptors(tmp_path: Path) -> None:
    """Every directory of a deep chain is visited on the way down and again on the way up."""
    depth = 3 * MAX_OPEN_DIRS
    root, top = tmp_path / "root", tmp_path / "top"
    root.mkdir()
    top.mkdir()
    make_deep(root, depth)
    fd = os.open(root, DIR_FLAGS)
    name = b"d" * 100
    for level in range(depth):  # a second directory after the chain at each level: read when the chain is done
        os.mkdir(b"z", dir_fd=fd)
        os.close(os.open(b"z/%d" % level, os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
        deeper = open_dir(fd, name)
        os.close(fd)
        fd = deeper
    os.close(fd)
    try:
        with view_of(top, root) as view:
            before = len(os.listdir("/proc/self/fd"))
            paths = [path for path, _ in view.walk()]
            assert len(paths) == 3 * depth + 1
            assert sum(path.endswith(b"/z/%d" % path.count(name)) or path == b"z/0" for path in paths) == depth
            assert max(map(len, paths)) > 4096 * 5
            assert len(os.listdir("/proc/self/fd")) <= before + MAX_OPEN_DIRS
            deepest = b"/".join([name] * depth)
            assert view.lstat(deepest + b"/end").kind is Kind.FILE
            os.close(view.open(deepest + b"/end"))
        with view_of(root) as a, view_of(tmp_path / "top") as b:
            assert len(list(diff(a, b))) == 3 * depth + 1
        target = tmp_path / "target"
        target.mkdir()
        fd = os.open(target, DIR_FLAGS)
        with view_of(root) as view:
            report = materialise(view, b"", fd)
        os.close(fd)
        assert (report.files, report.directories, report.warnings) == (depth + 1, 2 * depth, ())
        with view_of(root) as a, view_of(target) as b:
            assert list(diff(a, b)) == []
    finally:
        fd = os.open(tmp_path, DIR_FLAGS)
        for child in ("root", "target"):
            remove_tree(fd, child)
        os.close(fd)


def test_close_releases_every_descriptor(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", a__b__c="x", d__e="y")
    before = set(os.listdir("/proc/self/fd"))
    with view_of(root, root) as view:
        list(view.walk())
        view.close()
    assert set(os.listdir("/proc/self/fd")) <= before


# -- diff --------------------------------------------------------------------------------------------------------------


def test_diff_kinds_order_and_count(tmp_path: Path) -> None:
    a = layer(tmp_path / "a", same="s", changed="1", gone="x", dir__x="1", dir__y__z="2", becomes_dir="f")
    b = layer(tmp_path / "b", same="s", changed="22", new="333", dir="a file now", becomes_dir__in="4444")
    with view_of(a) as left, view_of(b) as right:
        changes = list(diff(left, right))
        assert [(c.path, str(c.kind)) for c in changes] == [
            (b"becomes_dir", "changed"),
            (b"becomes_dir/in", "added"),
            (b"changed", "changed"),
            (b"dir", "changed"),
            (b"dir/x", "deleted"),
            (b"dir/y", "deleted"),
            (b"dir/y/z", "deleted"),
            (b"gone", "deleted"),
            (b"new", "added"),
        ]
        assert count(changes) == FileChanges(added=3, changed=1, deleted=4, bytes=4 + 2 + 10 + 3)
        assert [c.path for c in diff(left, right, b"dir/y")] == [b"dir/y", b"dir/y/z"]
        with pytest.raises(FileNotFoundError):
            list(diff(left, right, b"nowhere"))


def test_diff_of_times_alone_is_nothing(tmp_path: Path) -> None:
    a, b = layer(tmp_path / "a", f="s", d__f="s"), layer(tmp_path / "b", f="s", d__f="s")
    os.utime(b / "f", ns=(1, 1))
    os.utime(b / "d", ns=(1, 1))
    with view_of(a) as left, view_of(b) as right:
        assert list(diff(left, right)) == []


def test_diff_prunes_what_the_same_layers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = layer(tmp_path / "base", **{f"big__d{i}__f": "x" for i in range(50)}, work__f="1")
    top = layer(tmp_path / "top", work__f="2")
    listed: list[int] = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: listed.append(fd) or real(fd))
    with view_of(base) as a, view_of(top, base) as b:
        assert [(c.path, c.kind) for c in diff(a, b)] == [(b"work/f", ChangeKind.CHANGED)]
    assert len(listed) == 2  # the root and work, of the layer on top alone


def test_diff_of_sparse_files_takes_the_time_of_their_data(tmp_path: Path) -> None:
    a, b = layer(tmp_path / "a"), layer(tmp_path / "b")
    for root, last in ((a, b"x"), (b, b"y")):
        for name, tail in (("same", b"x"), ("differs", last)):
            with open(root / name, "wb") as f:
                f.seek(1 << 42)  # 4 TiB: reading it would take an hour
                f.write(tail)
    with view_of(a) as left, view_of(b) as right:
        assert [c.path for c in diff(left, right)] == [b"differs"]


# -- materialise -------------------------------------------------------------------------------------------------------


def test_materialise_keeps_holes_links_and_times(tmp_path: Path) -> None:
    source = layer(tmp_path / "source", d__f="text")
    with open(source / "sparse", "wb") as f:
        f.truncate(1 << 30)
        f.seek(1 << 29)
        f.write(b"middle")
    os.link(source / "d/f", source / "other")
    os.utime(source / "d/f", ns=(1, 1_234_567_890_123_456_789))
    os.utime(source / "d", ns=(1, 987_654_321_987_654_321))
    (source / "l").symlink_to("/no/where")
    target = tmp_path / "target"
    target.mkdir()
    fd = os.open(target, DIR_FLAGS)
    with view_of(source) as view:
        report = materialise(view, b"", fd)
        with pytest.raises(ValueError, match="not empty"):
            materialise(view, b"", fd)
    os.close(fd)
    assert (report.files, report.directories, report.warnings) == (4, 1, ())
    assert report.bytes == (1 << 30) + 4
    st = os.stat(target / "sparse")
    assert st.st_size == 1 << 30
    assert st.st_blocks < 1000
    assert os.stat(target / "d/f").st_ino == os.stat(target / "other").st_ino
    assert os.stat(target / "d/f").st_mtime_ns == 1_234_567_890_123_456_789
    assert os.stat(target / "d").st_mtime_ns == 987_654_321_987_654_321
    assert os.readlink(target / "l") == "/no/where"


def test_materialise_a_part(tmp_path: Path) -> None:
    source = layer(tmp_path / "source", d__f="text", other="x")
    target = tmp_path / "target"
    target.mkdir()
    fd = os.open(target, DIR_FLAGS)
    with view_of(source) as view:
        materialise(view, b"d", fd)
        for path, error in ((b"other", NotADirectoryError), (b"no", FileNotFoundError)):
            (tmp_path / path.decode()).mkdir()
            empty = os.open(tmp_path / path.decode(), DIR_FLAGS)
            with pytest.raises(error):
                materialise(view, path, empty)
            os.close(empty)
    os.close(fd)
    assert os.listdir(target) == ["f"]


def test_materialise_warns_about_a_socket_and_escapes_its_name(tmp_path: Path) -> None:
    import socket

    source = layer(tmp_path / "s", f="x")
    sock = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(source)
    try:
        sock.bind("so\x1b[2Jck")
    finally:
        os.chdir(here)
        sock.close()
    target = tmp_path / "target"
    target.mkdir()
    fd = os.open(target, DIR_FLAGS)
    with view_of(source) as view:
        report = materialise(view, b"", fd)
    os.close(fd)
    assert report.warnings == ("'so\\x1b[2Jck' is a socket, which only its program can make.",)
    assert report.files == 1
