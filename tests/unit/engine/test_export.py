"""The forms for other programs: a tar, and an image archive that our own importer and every layout reader finds
right."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.transfer.export import ImageFacts, export_oci, reference_of
from snapshotd.errors import OutOfSpace
from snapshotd.formats.tar_writer import write_tree
from snapshotd.images.archive_file import TarBlobs, open_archive
from snapshotd.kernel import files
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from tests.records import begin, make_image
from tests.unit.engine.bundles import first, manifest

FACTS = ImageFacts("snapshotd/line:0123456789ab", 1_700_000_000_000_000_001, (("A", "b=c"), ("EMPTY", "")), "/home")


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    (tmp_path / "root").mkdir()
    first(tmp_path / "root")
    fd = os.open(tmp_path / "root", files.DIR_FLAGS)
    with StackView([fd]) as view:
        yield view
    os.close(fd)


def exported(view: View, scratch: Path) -> bytes:
    out = io.BytesIO()
    warnings = export_oci(view, FACTS, out.write, scratch)
    assert len(warnings) == 1
    assert ".wh.plain was left out" in warnings[0]
    return out.getvalue()


def test_tar_is_the_tree(view: View, tmp_path: Path) -> None:
    out = io.BytesIO()
    assert write_tree(view, out.write) == ()
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        assert {name.removeprefix("./") for name in tar.getnames()} == {
            os.fsdecode(path) or "." for path in manifest(view)
        }


def test_everything_in_an_image_has_the_digest_it_is_called_by(view: View, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(exported(view, tmp_path))) as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    blobs = {name.removeprefix("blobs/sha256/"): data for name, data in content.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(data).hexdigest() == digest for digest, data in blobs.items())
    assert json.loads(content["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (described,) = json.loads(content["index.json"])["manifests"]
    found = json.loads(blobs[described["digest"].removeprefix("sha256:")])
    for part in (found["config"], *found["layers"], described):
        assert part["size"] == len(blobs[part["digest"].removeprefix("sha256:")])
    (docker,) = json.loads(content["manifest.json"])
    assert docker["RepoTags"] == ["snapshotd/line:0123456789ab"]
    assert [docker["Config"], *docker["Layers"]] == [
        f"blobs/sha256/{p['digest'][7:]}" for p in (found["config"], *found["layers"])
    ]
    config = json.loads(content[docker["Config"]])
    assert config["created"] == "2023-11-14T22:13:20.000000001Z"
    assert config["config"] == {"Env": ["A=b=c", "EMPTY="], "Cmd": ["/bin/sh"], "WorkingDir": "/home"}
    assert config["rootfs"] == {"type": "layers", "diff_ids": [found["layers"][0]["digest"]]}


def test_our_own_importer_takes_it(view: View, tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(exported(view, tmp_path))
    (tmp_path / "target").mkdir()
    with open(tmp_path / "image.tar", "rb") as f:
        found = open_archive(TarBlobs(f), "the image")
        assert (found.config.env, found.config.workdir) == (FACTS.env, FACTS.workdir)
        fd = os.open(tmp_path / "target", files.DIR_FLAGS)
        (report,) = found.extract(fd, lambda _: None)
    assert report.warnings == ()
    with StackView([fd]) as back:
        expected = manifest(view)
        del expected[b".wh.plain"]
        assert manifest(back) == expected
    os.close(fd)


def test_the_same_tree_gives_the_same_image_and_leaves_nothing(view: View, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    assert exported(view, tmp_path / "scratch") == exported(view, tmp_path / "scratch")
    assert os.listdir(tmp_path / "scratch") == []


def test_a_full_disk_is_named(view: View, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, _: Any, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        "snapshotd.engine.transfer.export.tempfile.TemporaryFile", lambda **_: Full(tmp_path / "spool", "w")
    )
    with pytest.raises(OutOfSpace, match="cannot be gathered"):
        export_oci(view, FACTS, io.BytesIO().write, tmp_path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Line", "line"),
        ("a..b__c", "a-b-c"),
        ("UPPER.x-", "upper-x"),
        (None, None),
        ("...", None),
        ("a" * 64, "a" * 64),
    ],
)
def test_references_are_what_docker_takes(name: str | None, expected: str | None) -> None:
    trajectory, snapshot = begin(make_image())
    assert reference_of(snapshot, name) == f"snapshotd/{expected or trajectory.id[:12]}:{snapshot.id[:12]}"


@pytest.mark.parametrize(
    ("time_ns", "shown"), [(-1, "1970-01-01T00:00:00.000000000Z"), (1 << 62, "2116-02-20T23:53:38.427387904Z")]
)
def test_any_time_can_be_shown(view: View, tmp_path: Path, time_ns: int, shown: str) -> None:
    out = io.BytesIO()
    export_oci(view, ImageFacts(FACTS.reference, time_ns), out.write, tmp_path)
    assert f'"created":"{shown}"'.encode() in out.getvalue()
