"""Image archives: the output of `docker save`, and OCI image layouts (as a tar or as a folder). Layers are applied in
order.

Every blob is checked against the digest that names it, and every layer's plain content against its diff id; layouts are
read with bounds on everything. Sources: OCI image specification 1.1 (image-layout, index, manifest, config, layer);
Docker image specification 1.2.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.formats.ingest import IngestReport, TarLimits, ingest_tar
from snapshotd.formats.ingest_nodes import printable
from snapshotd.formats.tar_reader import ByteSource, MemberKind, TarReader
from snapshotd.images.config import ImageConfig, check_platform, parse_config
from snapshotd.images.decompress import drain, plain
from snapshotd.images.hashing import HashingReader
from snapshotd.kernel import files
from snapshotd.terms import number_of

MAX_JSON_BYTES = 4 << 20
MAX_LAYERS = 512
MAX_BLOBS = 20_000
_MAX_INDEX_DEPTH = 4
_ANY_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LEADS = re.compile(
    rb"(\./)?(blobs(/.*)?|oci-layout|index\.json|manifest\.json|repositories|[0-9a-f]{64}(/.*|\.json|\.tar)?)/?"
)
"""Names that the first member of an image archive can have; a root file system begins otherwise."""


class Blobs(Protocol):
    """The files of an archive by name."""

    def open(self, name: str) -> tuple[ByteSource, int] | None:
        """A reader at the file's beginning and its size; None when there is no such file. One at a time."""


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    digest: str | None
    """sha256 of the file as it lies there, if the archive says."""
    diff_id: str
    """sha256 of the plain tar."""


@dataclass(frozen=True, slots=True)
class ImageArchive:
    """One image in an archive: its configuration, and its layers, oldest first."""

    what: str
    config: ImageConfig
    layers: tuple[_Layer, ...]
    blobs: Blobs

    def extract(self, target_fd: int, progress: Callable[[str], None]) -> list[IngestReport]:
        """Apply all layers to the empty directory `target_fd`. UsageError (damaged), LimitExceeded, OutOfSpace."""
        reports: list[IngestReport] = []
        limits = TarLimits()
        for number, layer in enumerate(self.layers, 1):
            progress(f"layer {number} of {len(self.layers)}")
            report = self._apply(layer, number, target_fd, limits)
            reports.append(report)
            limits = TarLimits(limits.members - report.files - report.directories, limits.bytes - report.bytes)
        return reports

    def _apply(self, layer: _Layer, number: int, target_fd: int, limits: TarLimits) -> IngestReport:
        what = f"layer {number} of {self.what}"
        found = self.blobs.open(layer.name)
        if found is None:
            raise UsageError(f"{what} is missing in the archive; save the image again")
        packed = HashingReader(found[0])
        content = HashingReader(plain(packed, what))
        report = ingest_tar(content, target_fd, oci_whiteouts=True, limits=limits)
        drain(content, limits.bytes, what)
        drain(packed, found[1], what)
        if (
            layer.digest not in (None, "sha256:" + packed.hexdigest())
            or "sha256:" + content.hexdigest() != layer.diff_id
        ):
            wanted = layer.digest or layer.diff_id
            raise UsageError(f"{what} is damaged: its content does not have the digest {wanted}; save the image again")
        return report


def looks_like_archive(first_member: bytes) -> bool:
    """True if a tar that begins with this member holds an image rather than a root file system."""
    return _LEADS.fullmatch(first_member) is not None


def open_archive(blobs: Blobs, what: str) -> ImageArchive:
    """Find the one image for this machine in an archive. UsageError when there is none, several, or something is
    malformed."""
    if blobs.open("index.json"):
        return _from_oci(blobs, what)
    manifests = _json(blobs, "manifest.json", what, None)
    if not isinstance(manifests, list) or not all(isinstance(m, dict) for m in manifests):
        raise UsageError(f"{what} is malformed: manifest.json is not a list of images")
    if len(manifests) != 1:
        raise UsageError(f"{what} holds {number_of(len(manifests), 'image')}; save one image per archive")
    name, layers = manifests[0].get("Config"), manifests[0].get("Layers")
    if not isinstance(name, str) or not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise UsageError(f"{what} is malformed: manifest.json names no configuration or layers")
    hex_digest = posixpath.basename(name).removesuffix(".json")
    config = _json(blobs, name, what, f"sha256:{hex_digest}")
    return _archive(blobs, what, f"image:sha256:{hex_digest}", config, [(layer, None) for layer in layers])


def _from_oci(blobs: Blobs, what: str) -> ImageArchive:
    manifest = _json(blobs, "index.json", what, None)
    for _ in range(_MAX_INDEX_DEPTH):
        if "manifests" not in manifest:
            break
        chosen = _choose(manifest["manifests"], what)
        manifest = _json(blobs, _blob_name(chosen, what), what, chosen["digest"])
    config_ref, layers = manifest.get("config"), manifest.get("layers")
    if (
        not isinstance(config_ref, dict)
        or not isinstance(layers, list)
        or not all(isinstance(layer, dict) for layer in layers)
    ):
        raise UsageError(f"{what} is malformed: its manifest names no configuration or layers")
    config = _json(blobs, _blob_name(config_ref, what), what, config_ref["digest"])
    named = [(_blob_name(layer, what), str(layer["digest"])) for layer in layers]
    return _archive(blobs, what, "image:" + config_ref["digest"], config, named)


def _choose(manifests: object, what: str) -> dict[str, Any]:
    """The one entry of an index that this machine can run; attestations and other machines' images are passed over."""
    if (
        not isinstance(manifests, list)
        or not all(isinstance(m, dict) for m in manifests)
        or len(manifests) > MAX_LAYERS
    ):
        raise UsageError(f"{what} is malformed: its index is not a list of images")
    fitting = []
    for entry in manifests:
        target = entry.get("platform")
        try:
            if isinstance(target, dict):
                if target.get("os") == "unknown":
                    continue
                check_platform(target.get("os"), target.get("architecture"), what)
        except UsageError:
            continue
        fitting.append(entry)
    if len({entry.get("digest") for entry in fitting}) != 1:
        raise UsageError(f"{what} holds {number_of(len(fitting), 'image')} for this machine; save exactly one")
    return dict(fitting[0])


def _blob_name(descriptor: dict[str, Any], what: str) -> str:
    match = _ANY_DIGEST.fullmatch(str(descriptor.get("digest")))
    if not match:
        raise UsageError(
            f"{what} is malformed: it refers to {printable(str(descriptor.get('digest')).encode())!r}, not a sha256 digest"
        )
    return f"blobs/sha256/{match[1]}"


def _archive(
    blobs: Blobs, what: str, source_id: str, config: Any, layers: Sequence[tuple[str, str | None]]
) -> ImageArchive:
    if not isinstance(config, dict) or not isinstance(config.get("rootfs"), dict):
        raise UsageError(f"{what} is malformed: its configuration lists no layers")
    check_platform(config.get("os"), config.get("architecture"), what)
    diff_ids = config["rootfs"].get("diff_ids")
    if not isinstance(diff_ids, list) or not all(isinstance(d, str) and _ANY_DIGEST.fullmatch(d) for d in diff_ids):
        raise UsageError(f"{what} is malformed: its configuration lists no layers")
    if len(diff_ids) != len(layers) or not layers:
        raise UsageError(
            f"{what} is malformed: it has {number_of(len(layers), 'layer')}, its configuration says {len(diff_ids)}"
        )
    if len(layers) > MAX_LAYERS:
        raise LimitExceeded(f"{what} has {number_of(len(layers), 'layer')}; {MAX_LAYERS} is the most that is taken")
    paired = tuple(_Layer(name, digest, diff_id) for (name, digest), diff_id in zip(layers, diff_ids, strict=True))
    return ImageArchive(what, parse_config(source_id, config.get("config"), what), paired, blobs)


def _json(blobs: Blobs, name: str, what: str, digest: str | None) -> Any:
    found = blobs.open(name)
    if found is None:
        raise UsageError(f"{what} is not an image archive or incomplete: {printable(name.encode())} is missing in it")
    stream, size = found
    if size > MAX_JSON_BYTES:
        raise LimitExceeded(f"{printable(name.encode())} in {what} is larger than {MAX_JSON_BYTES} bytes")
    parts = []
    while part := stream.read(MAX_JSON_BYTES):
        parts.append(part)
    data = b"".join(parts)
    if digest is not None and "sha256:" + hashlib.sha256(data).hexdigest() != digest:
        raise UsageError(
            f"{printable(name.encode())} in {what} is damaged: its content does not have the digest it is named by"
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{printable(name.encode())} in {what} is not JSON") from exc
    if not isinstance(value, dict | list) or (name != "manifest.json" and not isinstance(value, dict)):
        raise UsageError(f"{printable(name.encode())} in {what} is malformed: it is not an object")
    return value


class TarBlobs:
    """The files in a plain, seekable tar, by name. Symbolic links between them are resolved: older engines save a
    shared layer once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._found: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        for count, member in enumerate(TarReader(file), 1):
            if count > MAX_BLOBS:
                raise LimitExceeded(f"the archive has more than {MAX_BLOBS} members, so it is no image archive")
            name = posixpath.normpath(os.fsdecode(member.path))
            if member.kind is MemberKind.FILE:
                self._found[name] = (member.offset, member.size)
            elif member.kind is MemberKind.SYMLINK:
                self._links[name] = posixpath.normpath(
                    posixpath.join(posixpath.dirname(name), os.fsdecode(member.link))
                )

    def open(self, name: str) -> tuple[ByteSource, int] | None:
        found = self._found.get(name) or self._found.get(self._links.get(name, ""))
        return (_Part(self._file, *found), found[1]) if found else None


class _Part:
    """A range of a file. Keeps its own position."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._file, self._offset, self._left = file, offset, size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._file.fileno(), max(0, min(size, self._left)), self._offset)
        self._offset += len(data)
        self._left -= len(data)
        return data


class FolderBlobs:
    """The files of an OCI layout that is a folder. Close it after use."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: BinaryIO | None = None

    def open(self, name: str) -> tuple[ByteSource, int] | None:
        self._close_file()
        try:
            fd = files.open_beneath(self._fd, os.fsencode(name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        st = os.fstat(fd)
        self._open = open(fd, "rb", buffering=0)  # noqa: SIM115 - closed by the next open or by close
        return (_Part(self._open, 0, st.st_size), st.st_size) if stat.S_ISREG(st.st_mode) else None

    def _close_file(self) -> None:
        if self._open:
            self._open.close()
            self._open = None

    def close(self) -> None:
        self._close_file()
        os.close(self._fd)
