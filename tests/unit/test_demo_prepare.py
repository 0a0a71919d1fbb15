"""The demo's preparation refuses what does not fit exactly."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCH = """--- a/p/x.txt
+++ b/p/x.txt
@@ -1,3 +1,2 @@
 one
-two
 three
@@ -5,2 +4,3 @@
 five
+new
 six
"""
BEFORE = "one\ntwo\nthree\nfour\nfive\nsix\n"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_prepare", ROOT / "docs/examples/prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project(folder: Path, content: str) -> Path:
    (folder / "p").mkdir()
    (folder / "p/x.txt").write_text(content)
    (folder / "bug.patch").write_text(PATCH)
    return folder / "p/x.txt"


def test_a_patch_that_fits_is_applied(prepare: ModuleType, tmp_path: Path) -> None:
    file = project(tmp_path, BEFORE)
    prepare.apply_patch(tmp_path / "bug.patch", tmp_path)
    assert file.read_text() == "one\nthree\nfour\nfive\nnew\nsix\n"


@pytest.mark.parametrize("line", ["one", "two", "three", "five", "six"])
def test_a_patch_that_does_not_fit_changes_nothing(prepare: ModuleType, tmp_path: Path, line: str) -> None:
    other = BEFORE.replace(line, "other")
    file = project(tmp_path, other)
    with pytest.raises(SystemExit, match="does not fit"):
        prepare.apply_patch(tmp_path / "bug.patch", tmp_path)
    assert file.read_text() == other


def test_only_regular_files_inside_are_unpacked(prepare: ModuleType, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in ("top/good", "top/../../evil", "top/sub/also"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("top/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    prepare.unpack(tmp_path / "a.tar.gz", target)
    assert sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()) == [
        "good",
        "sub/also",
    ]
    assert not list(tmp_path.rglob("evil"))
