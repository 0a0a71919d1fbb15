"""The copy of a folder's changes: once for each file, within a bound, and not again and again where that is not enough."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.folders import capture
from snapshotd.engine.folders.capture import TOP, Capture, Refusal
from snapshotd.engine.folders.scan import FolderIndex
from snapshotd.errors import LimitExceeded
from snapshotd.kernel.identity import HostUser
from tests.capabilities import require


class Captured:
    """A folder, and the root of a layer beside it."""

    def __init__(self, place: Path) -> None:
        self.folder, layer = place / "folder", place / "layer"
        self.top = layer / os.fsdecode(TOP)
        for path in (self.folder, layer):
            path.mkdir()
        self.root, self.layer = (os.open(path, os.O_RDONLY) for path in (self.folder, layer))
        self.index = FolderIndex()

    def capture(self, longest_s: float = 60.0) -> Capture:
        found = self.index.scan(self.root)
        copied = Capture(self.root, HostUser(os.getuid(), os.getgid()), found, longest_s)
        copied.write(self.layer)
        for path, mark, digest in copied.took:
            self.index.note_captured(path, mark, digest)
        self.index.note_look(found.began_ns)
        return copied


@pytest.fixture
def captured(tmp_path: Path) -> Iterator[Captured]:
    require("root")
    found = Captured(tmp_path)
    yield found
    for fd in (found.root, found.layer):
        os.close(fd)


def test_a_file_is_copied_once_whatever_names_it_has(captured: Captured) -> None:
    (captured.folder / "d").mkdir()
    (captured.folder / "a").write_text("1")
    names = ["a", *(f"d/{number}" for number in range(100))]
    for name in names[1:]:
        os.link(captured.folder / "a", captured.folder / name)
    captured.capture()
    assert len({(captured.top / name).stat().st_ino for name in names}) == 1
    assert not captured.index.scan(captured.root), "each name is known as it is"

    (captured.folder / "d" / "7").unlink()
    (captured.folder / "d" / "7").write_text("of its own")
    (captured.folder / "d" / "8").write_text("2")
    captured.capture()
    assert (captured.top / "d" / "7").read_text() == "of its own"
    assert {(captured.top / name).read_text() for name in names if name != "d/7"} == {"2"}
    assert (captured.top / "a").stat().st_nlink == len(names) - 1


def test_files_that_are_no_longer_one_are_two_in_the_copy(captured: Captured) -> None:
    (captured.folder / "a").write_text("1")
    os.link(captured.folder / "a", captured.folder / "b")
    captured.capture()
    (captured.folder / "new").write_text("2")
    (captured.folder / "new").rename(captured.folder / "b")
    captured.capture()
    assert ((captured.top / "a").read_text(), (captured.top / "b").read_text()) == ("1", "2")
    assert (captured.top / "a").stat().st_nlink == 1


def test_a_capture_that_takes_too_long_names_the_folder_and_what_to_do(captured: Captured) -> None:
    (captured.folder / "a").write_text("1")
    with pytest.raises(LimitExceeded, match=r"of 1 changed files of .*/folder could .*\.snapshotdignore"):
        captured.capture(longest_s=-1.0)


def test_a_folder_that_took_too_long_is_not_tried_again_until_its_rules_change(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "LONGEST_LOOK_S", 0.0)
    found, tried = Refusal(), []

    def hook() -> None:
        found.check(captured.root)
        with found.note(captured.root):
            tried.append(1)
            raise LimitExceeded("too much")

    for _ in range(3):
        with pytest.raises(LimitExceeded, match="too much"):
            hook()
    assert len(tried) == 1
    (captured.folder / ".snapshotdignore").write_text("data/\n")
    with pytest.raises(LimitExceeded):
        hook()
    assert len(tried) == 2
    monkeypatch.setattr(capture, "LONGEST_LOOK_S", 60.0)
    (captured.folder / ".snapshotdignore").write_text("data/\nmore/\n")
    for _ in range(2):
        with pytest.raises(LimitExceeded):
            hook()
    assert len(tried) == 4, "a refusal that costs nothing is not remembered"
