"""A sandbox that moves its mounts about never keeps a way to write into a layer that was sealed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from snapshotd.layers.pivot import Busy, layout_of, pivot
from tests.parking_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="makes mount and pid namespaces")


def _mount_in_a_plain_directory() -> None:
    """As a runtime does at /run/snapshotd: the directory above it belongs to the root."""
    os.makedirs("/outer/inner")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/outer/inner"], check=True)
    Path("/victim").mkdir()
    Path("/victim/file").write_text("sealed")


def _forge() -> None:
    Path("/victim/file").write_text("forged")
    Path("/victim/new").write_text("forged")


def _sealed(box: Box) -> dict[str, str]:
    """Pivot, let the sandbox write where it wrote before, and read what the sealed layer holds then."""
    layer = box._upper
    box.snapshot_now()
    box.inside(_forge)
    return {path.name: path.read_text() for path in (box.folder / layer / "upper" / "victim").iterdir()}


@pytest.mark.parametrize(
    "name", [b"/victim\rx", b"/victim\x0bx", b"/victim\x85x", b"/victim x", b"/victim\nx", b"/victim\rx\ry"]
)
def test_a_name_with_a_line_break(box: Box, name: bytes) -> None:
    box.inside(_mount_in_a_plain_directory)
    box.inside(lambda: os.rename(b"/outer", name))
    assert _sealed(box) == {"file": "sealed"}
    assert name + b"/inner" in [point for point, _ in layout_of(box._target).points], "it has come along"


@pytest.mark.parametrize("instead", ["directory", "file", "link", "nothing", "mount"])
def test_moved_between_looking_and_pivoting(box: Box, instead: str) -> None:
    box.inside(_mount_in_a_plain_directory)
    seen = layout_of(box._target)

    def move() -> None:
        os.rename("/outer", "/elsewhere")
        if instead != "nothing":
            os.mkdir("/outer")
        if instead == "directory":
            os.mkdir("/outer/inner")
        elif instead == "file":
            Path("/outer/inner").touch()
        elif instead == "link":
            os.symlink("/victim", "/outer/inner")
        elif instead == "mount":
            os.mkdir("/outer/inner")
            subprocess.run(["mount", "--bind", "/victim", "/outer/inner"], check=True)

    box.inside(move)
    stack, upper = box._stack.push(box._upper), box._layer()
    with pytest.raises(Busy, match="moved"):
        pivot(box._target, box._store, stack, upper, seen, seal=True)
    assert layout_of(box._target).root_id == seen.root_id
    box.inside(_forge)  # it is not sealed, and goes on
    if instead != "mount":
        layer = box._upper
        assert _sealed(box) == {"file": "forged", "new": "forged"}
        assert (box.folder / layer / "upper" / "victim" / "file").read_text() == "forged"
