"""Forms of a snapshot for other programs: a plain tar of its tree, and an image that `docker load` takes.

The image archive is both what `docker save` writes (`manifest.json`; for Docker 20.10 and newer) and an OCI image
layout (`index.json`):

    oci-layout  index.json  manifest.json  blobs/sha256/<digest>: manifest, configuration, one layer with the whole tree

One snapshot and one name always give the same bytes. Sources: OCI image specification 1.1 (image-layout, manifest,
config, layer); Docker image specification 1.2 ("Combined Image JSON + Filesystem Changeset Format").
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

from snapshotd.errors import NO_ROOM, OutOfSpace
from snapshotd.formats.tar_reader import BLOCK
from snapshotd.formats.tar_writer import END, ArchiveMarks, file_header, write_tree
from snapshotd.trees.view import View
from snapshotd.types import Snapshot, short

_PIECE_BYTES = 1 << 20
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_S = 253_402_300_799
"""The end of the year 9999, which is how far RFC 3339 goes."""
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The content of an exported image's configuration. `reference` is the name that `docker load` gives it
    (`reference_of`)."""

    reference: str
    created_at_ns: int
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/workspace"


def reference_of(snapshot: Snapshot, trajectory_name: str | None) -> str:
    """`snapshotd/<trajectory>:<snapshot>` as a Docker reference, which takes lower case only."""
    name = re.sub(r"[^a-z0-9]+", "-", (trajectory_name or short(snapshot.trajectory)).lower()).strip("-")
    return f"snapshotd/{name or short(snapshot.trajectory)}:{short(snapshot.id)}"


def export_oci(view: View, facts: ImageFacts, write: Callable[[bytes], object], scratch: Path) -> tuple[str, ...]:
    """Write an image with the tree as its one layer. The layer is gathered in an unnamed temporary file in `scratch`
    first, because its size and digest come before it. Returns warnings and raises as `write_tree`; OutOfSpace
    (`scratch`)."""
    with tempfile.TemporaryFile(dir=scratch, buffering=0) as spool:
        digest = hashlib.sha256()

        def gather(data: bytes) -> None:
            digest.update(data)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[spool.write(rest) or 0 :]
            except OSError as exc:
                if exc.errno not in NO_ROOM:
                    raise
                raise OutOfSpace(
                    f"the image cannot be gathered in {scratch}: the disk is full; free as much as its files take"
                ) from exc

        warnings = write_tree(view, gather, marks=ArchiveMarks.OCI)
        size = spool.tell()
        spool.seek(0)
        _write_archive(facts, digest.hexdigest(), spool, size, write)
    return warnings


def _write_archive(
    facts: ImageFacts, layer: str, spool: BinaryIO | Any, size: int, write: Callable[[bytes], object]
) -> None:
    config = _json(_config(facts, layer))
    config_digest = hashlib.sha256(config).hexdigest()
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "digest": f"sha256:{config_digest}", "size": len(config)},
            "layers": [{"mediaType": _LAYER, "digest": f"sha256:{layer}", "size": size}],
        }
    )
    manifest_digest = hashlib.sha256(manifest).hexdigest()
    annotations = {
        "io.containerd.image.name": f"docker.io/{facts.reference}",
        "org.opencontainers.image.ref.name": facts.reference.rpartition(":")[2],
    }
    index = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    "mediaType": _MANIFEST,
                    "digest": f"sha256:{manifest_digest}",
                    "size": len(manifest),
                    "annotations": annotations,
                }
            ],
        }
    )
    docker = [
        {"Config": f"blobs/sha256/{config_digest}", "RepoTags": [facts.reference], "Layers": [f"blobs/sha256/{layer}"]}
    ]
    for name, data in (
        ("oci-layout", _json({"imageLayoutVersion": "1.0.0"})),
        ("index.json", index),
        ("manifest.json", _json(docker)),
        (f"blobs/sha256/{manifest_digest}", manifest),
        (f"blobs/sha256/{config_digest}", config),
    ):
        write(file_header(name.encode(), len(data)) + data + bytes(-len(data) % BLOCK))
    write(file_header(f"blobs/sha256/{layer}".encode(), size))
    while piece := spool.read(_PIECE_BYTES):
        write(piece)
    write(bytes(-size % BLOCK) + END)


def _config(facts: ImageFacts, layer: str) -> dict[str, Any]:
    created = _rfc3339(facts.created_at_ns)
    machine = platform.machine()
    return {
        "created": created,
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {
            "Env": [f"{name}={value}" for name, value in facts.env],
            "Cmd": ["/bin/sh"],
            "WorkingDir": facts.workdir,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
        "history": [{"created": created, "created_by": "snapshotd export"}],
    }


def _rfc3339(time_ns: int) -> str:
    seconds, nanoseconds = divmod(max(0, time_ns), 10**9)
    moment = _EPOCH + timedelta(seconds=min(seconds, _LATEST_S))
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
