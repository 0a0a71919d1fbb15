"""An exported image is taken by a real Docker engine, which then runs it with the snapshot's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from snapshotd.engine.transfer.export import ImageFacts, export_oci
from snapshotd.kernel import files
from snapshotd.trees.stack_view import StackView

pytestmark = pytest.mark.docker

REFERENCE = "snapshotd/exported:0123456789ab"


def _docker(*arguments: str) -> str:
    result = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False
    )
    assert result.returncode == 0, result
    return result.stdout


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A root file system with what image layers are often bad at."""
    root = tmp_path / "root"
    shutil.copytree(small_root, root, symlinks=True)
    (root / "workspace/answer").write_text("forty-two\n")
    os.link(root / "workspace/answer", root / "home/same")
    os.setxattr(
        root / "workspace/answer", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000")
    )
    (root / "workspace" / ("n" * 200)).write_text("long\n")
    (root / "workspace/.wh.answer").write_text("no deletion")
    with open(root / "workspace/sparse", "wb") as f:
        os.pwrite(f.fileno(), b"in the middle", 48 << 20)
        os.ftruncate(f.fileno(), 96 << 20)
    (root / "workspace/suid").write_text("x")
    (root / "workspace/suid").chmod(0o4711)
    os.utime(root / "workspace/suid", ns=(0, 1_600_000_000_123_456_789))
    os.chown(root / "home", 1234, 5678)
    return root


@pytest.mark.usefixtures("docker_daemon")
def test_docker_load_runs_it(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    facts = ImageFacts(
        REFERENCE, 1_700_000_000_123_456_789, (("PATH", "/usr/bin:/bin"), ("GREETING", "good day")), "/workspace"
    )
    fd = os.open(root, files.DIR_FLAGS)
    with StackView([fd]) as view, open(archive, "wb") as f:
        warnings = export_oci(view, facts, f.write, tmp_path)
    os.close(fd)
    assert len(warnings) == 1, warnings
    assert ".wh.answer" in warnings[0]
    assert archive.stat().st_size < 1 << 30
    assert REFERENCE in _docker("load", "--input", str(archive))
    try:
        shown = json.loads(_docker("inspect", REFERENCE))[0]
        assert shown["Created"] == "2023-11-14T22:13:20.123456789Z"
        assert (shown["Config"]["Cmd"], shown["Config"]["WorkingDir"], shown["Config"]["Entrypoint"]) == (
            ["/bin/sh"],
            "/workspace",
            None,
        )
        script = (
            'cat answer n*; echo "$GREETING"; stat -c "%a %h %s" answer suid; stat -c "%u %g" /home; stat -c %s sparse'
        )
        script += "; stat -c %y suid"
        said = _docker("run", "--rm", "--network", "none", REFERENCE, "sh", "-c", script)
        assert said.splitlines() == [
            "forty-two",
            "long",
            "good day",
            "644 2 10",
            "4711 1 1",
            "1234 5678",
            str(96 << 20),
            "2020-09-13 12:26:40.123456789 +0000",
        ]
    finally:
        _docker("rmi", REFERENCE)
