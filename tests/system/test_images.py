"""Images for real: built from packages twice, imported from every kind of source, hostile ones refused, nothing left
behind."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
import zstandard

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import NotFound, NotPermitted, SandboxFailed, SnapshotdError, UsageError
from snapshotd.images import machine, recipes
from snapshotd.images.shared import SharedBuilds
from snapshotd.images.store import ImageStore
from snapshotd.types import Image
from tests import built_images
from tests.tiny_registry import registry

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.timeout(1200),  # two builds, while others build too
]
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


class Bench:
    """A store in a directory of its own, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "layers").mkdir(parents=True, exist_ok=True)
        self.catalog = SqliteCatalog(folder / "catalog.db")
        self.said: list[str] = []
        self.store = self.open()

    def open(self) -> ImageStore:
        self.store = ImageStore(self.folder / "layers", self.catalog, SharedBuilds(self.folder / "builds"))
        return self.store

    def take(self, source: Path | str, name: str | None = None) -> Image:
        return self.store.import_(str(source), name, self.said.append)

    def root(self, image: Image) -> Path:
        return self.folder / "layers/images" / image.id / "root"

    def left(self) -> list[str]:
        return sorted(set(os.listdir(self.folder / "layers/images")) - {image.id for image in self.store.list()})


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "state")
    yield bench
    assert bench.left() == []
    bench.catalog.close()


def tar_of(files: dict[str, bytes | None]) -> bytes:
    """A tar of files (bytes), directories (None) and links (a `->` value)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.mtime, info.mode = 1_600_000_000, 0o755
            if data is None:
                info.type = tarfile.DIRTYPE
            elif data.startswith(b"-> "):
                info.type, info.linkname = tarfile.SYMTYPE, data[3:].decode()
            else:
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


ROOT = tar_of({"etc": None, "etc/os-release": b"ID=test", "bin": b"-> usr/bin", "usr/bin": None, "usr/bin/sh": b"#!"})
LAYERS = (
    tar_of({"etc": None, "etc/old": b"1", "etc/kept": b"1", "opt": None, "opt/a": b"1", "data": None, "data/x": b"1"}),
    tar_of({"etc/.wh.old": b"", ".wh.opt": b"", "data/.wh..wh..opq": b"", "data/y": b"2", "etc/new": b"2"}),
)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config_of(layers: tuple[bytes, ...], **config: object) -> bytes:
    body = {
        "Env": ["PATH=/usr/bin", "A=b=c", "EMPTY"],
        "WorkingDir": "/app",
        "Entrypoint": ["/bin/evil"],
        "User": "0",
        **config,
    }
    diff_ids = ["sha256:" + sha(layer) for layer in layers]
    return json.dumps(
        {"os": "linux", "architecture": MACHINE, "config": body, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    ).encode()


def docker_archive(layers: tuple[bytes, ...] = LAYERS, **config: object) -> bytes:
    """What `docker save` of engines before 25 writes."""
    data = config_of(layers, **config)
    names = [f"{sha(layer)}/layer.tar" for layer in layers]
    manifest = json.dumps([{"Config": f"{sha(data)}.json", "RepoTags": ["x:y"], "Layers": names}]).encode()
    return tar_of({**dict(zip(names, layers, strict=True)), f"{sha(data)}.json": data, "manifest.json": manifest})


def oci_layout(
    layers: tuple[bytes, ...] = LAYERS, pack: str = "gzip", *, nested: bool = True
) -> dict[str, bytes | None]:
    packed = {"gzip": gzip.compress, "zstd": zstandard.compress, "": bytes}[pack]
    blobs = [packed(layer) for layer in layers]
    config = config_of(layers)

    def descriptor(kind: str, data: bytes, **more: object) -> dict[str, object]:
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": "sha256:" + sha(data),
            "size": len(data),
            **more,
        }

    described = [descriptor("layer.v1.tar+" + pack, blob) for blob in blobs]
    manifest = json.dumps(
        {"schemaVersion": 2, "config": descriptor("config.v1+json", config), "layers": described}
    ).encode()
    here = {"os": "linux", "architecture": MACHINE}
    index = {
        "manifests": [
            descriptor("manifest.v1+json", b"attestation", platform={"os": "unknown", "architecture": "unknown"}),
            descriptor("manifest.v1+json", b"another", platform={"os": "windows", "architecture": MACHINE}),
            descriptor("manifest.v1+json", manifest, platform=here),
        ]
    }
    everything = [config, manifest, *blobs]
    if nested:
        inner = json.dumps(index).encode()
        everything.append(inner)
        index = {"manifests": [descriptor("index.v1+json", inner)]}
    files: dict[str, bytes | None] = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
    }
    return files | {f"blobs/sha256/{sha(blob)}": blob for blob in everything}


def check_layers(bench: Bench, image: Image) -> None:
    root = bench.root(image)
    assert sorted(os.listdir(root / "etc")) == ["hostname", "hosts", "kept", "new", "resolv.conf"]
    assert os.listdir(root / "data") == ["y"]
    assert not (root / "opt").exists()
    assert image.env == (("PATH", "/usr/bin"), ("A", "b=c"), ("EMPTY", ""))
    assert image.workdir == "/app"


# -- importing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress, zstandard.compress])
def test_a_root_file_system_tar(bench: Bench, tmp_path: Path, pack: object) -> None:
    (tmp_path / "debian.tar.gz").write_bytes(pack(ROOT))  # type: ignore[operator]
    image = bench.take(tmp_path / "debian.tar.gz")
    root = bench.root(image)
    assert (image.name, image.workdir, image.env) == ("debian", "/workspace", ())
    assert bench.store.find("debian") == image
    assert os.readlink(root / "bin") == "usr/bin"
    for path, mode in (
        ("proc", 0o555),
        ("dev", 0o755),
        ("run/snapshotd", 0o755),
        ("tmp", 0o1777),
        ("workspace", 0o755),
    ):
        assert stat.S_IMODE((root / path).stat().st_mode) == mode, path
    assert (root / "etc/resolv.conf").is_file()
    assert (root / "etc").stat().st_mtime == 1_600_000_000


def test_the_same_tar_is_taken_once_and_copied_for_another_name(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(ROOT)
    first = bench.take(tmp_path / "a.tar")
    assert bench.take(tmp_path / "a.tar") == first
    other = bench.take(tmp_path / "a.tar", "b")
    assert other.id != first.id
    assert manifest(bench.root(other)) == manifest(bench.root(first))
    bench.store.remove("a")
    assert [image.name for image in bench.store.list()] == ["b"]
    assert (bench.root(other) / "etc/os-release").read_text() == "ID=test"


def test_two_imports_of_one_tar_are_one_tree(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(ROOT)
    first = manifest(bench.root(bench.take(tmp_path / "a.tar")))
    bench.store.remove("a")
    assert manifest(bench.root(bench.take(tmp_path / "a.tar"))) == first


def test_an_empty_image_waits_for_no_other(bench: Bench) -> None:
    """A hook in a user's folder needs one at once, while the first image is built."""
    begun, end = threading.Event(), threading.Event()

    def progress(_: str) -> None:
        begun.set()
        end.wait(60)
        raise RuntimeError

    def build() -> None:
        with contextlib.suppress(RuntimeError):
            bench.store.build(built_images.RECIPE, None, progress)

    building = threading.Thread(target=build)
    building.start()
    made: list[Image] = []
    waiting = threading.Thread(target=lambda: made.append(bench.store.empty((), "/workspace")))
    try:
        assert begun.wait(60)
        waiting.start()
        waiting.join(10)
        assert made, "it waits for the build"
        assert bench.store.empty((), "/workspace") == made[0]
    finally:
        end.set()
        building.join()
        waiting.join()


def test_a_folder(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "my root"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/resolv.conf").symlink_to("/run/somewhere")
    image = bench.take(folder)
    assert image.name == "my-root"
    assert os.readlink(bench.root(image) / "etc/resolv.conf") == "/run/somewhere"
    assert not (folder / "proc").exists()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_docker_archive(bench: Bench, tmp_path: Path, pack: object) -> None:
    (tmp_path / "saved.tar").write_bytes(pack(docker_archive()))  # type: ignore[operator]
    check_layers(bench, bench.take(tmp_path / "saved.tar"))


@pytest.mark.parametrize("pack", ["", "gzip", "zstd"])
@pytest.mark.parametrize("nested", [True, False])
def test_an_oci_archive(bench: Bench, tmp_path: Path, pack: str, nested: bool) -> None:
    (tmp_path / "oci.tar").write_bytes(tar_of(oci_layout(pack=pack, nested=nested)))
    check_layers(bench, bench.take(tmp_path / "oci.tar"))


def test_an_oci_layout_folder_and_an_archive_of_it_are_one_image(bench: Bench, tmp_path: Path) -> None:
    for name, data in oci_layout().items():
        path = tmp_path / "layout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data or b"")
    image = bench.take(tmp_path / "layout", "same")
    check_layers(bench, image)
    (tmp_path / "saved.tar").write_bytes(docker_archive())
    assert bench.take(tmp_path / "saved.tar", "same") == image


def test_a_shared_layer_that_is_saved_once_and_linked(bench: Bench, tmp_path: Path) -> None:
    layer = LAYERS[0]
    data = config_of((layer, layer))
    manifest_json = json.dumps(
        [{"Config": f"{sha(data)}.json", "Layers": ["a" * 64 + "/layer.tar", "b" * 64 + "/layer.tar"]}]
    ).encode()
    link = b"-> ../" + b"a" * 64 + b"/layer.tar"
    names = {
        "a" * 64 + "/layer.tar": layer,
        "b" * 64 + "/layer.tar": link,
        f"{sha(data)}.json": data,
        "manifest.json": manifest_json,
    }
    (tmp_path / "saved.tar").write_bytes(tar_of(names))
    assert (bench.root(bench.take(tmp_path / "saved.tar")) / "opt/a").read_bytes() == b"1"


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/snapshotd-no-such-engine.sock")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_an_image_of_a_registry(bench: Bench, tmp_path: Path, nested: bool, pack: str) -> None:
    """Without an engine. It is the same image as a saved one, and is asked for once."""
    with registry(oci_layout(pack=pack, nested=nested)) as server:
        name = f"{server.address}/test/app:1"
        image = bench.store.ensure(name, bench.said.append)
        assert (image.name, image.source) == (name, f"registry {name}")
        check_layers(bench, image)
        asked = len(server.asked)
        assert bench.store.ensure(name, bench.said.append) == image
        assert len(server.asked) == asked
    (tmp_path / "saved.tar").write_bytes(docker_archive())
    assert bench.take(tmp_path / "saved.tar", name) == image


@pytest.mark.usefixtures("no_engine")
def test_an_image_of_a_registry_by_its_digest(bench: Bench) -> None:
    layout = oci_layout(nested=False)
    digest = json.loads(layout["index.json"] or b"")["manifests"][-1]["digest"]
    blob = f"blobs/{digest.replace(':', '/')}"
    with registry(layout) as server:
        name = f"{server.address}/test/app@{digest}"
        whole = layout[blob]
        layout[blob] = (whole or b"").replace(b"{", b" {", 1)  # the same to a reader
        with pytest.raises(UsageError, match="does not have its digest"):
            bench.store.ensure(name, bench.said.append)
        layout[blob] = whole
        check_layers(bench, bench.store.ensure(name, bench.said.append))


@pytest.mark.usefixtures("no_engine")
def test_a_registry_that_is_hostile_or_has_no_such_image(bench: Bench) -> None:
    layout = oci_layout(pack="")
    with registry(layout) as server:
        name = f"{server.address}/test/app"
        with pytest.raises(NotFound, match="the registry has no image"):
            bench.store.ensure(f"{name}:2", bench.said.append)
        for blob, data in list(layout.items()):
            if not blob.startswith("blobs/"):
                continue
            layout[blob] = (data or b"")[:-1] + b"x"
            with pytest.raises(SnapshotdError, match=r"damaged|does not have|digest|cannot be read|malformed"):
                bench.store.ensure(f"{name}:1", bench.said.append)
            layout[blob] = data
        server.cut = True
        with pytest.raises(SandboxFailed, match="cannot be read"):
            bench.store.ensure(f"{name}:1", bench.said.append)
        server.cut, server.token = False, "for nobody"
        with pytest.raises(NotPermitted, match=f"docker pull {name}:1"):
            bench.store.ensure(f"{name}:1", bench.said.append)
    with pytest.raises(
        NotFound, match=r"the Docker engine cannot be reached .* and the registry .* Connection refused"
    ):
        bench.store.ensure(f"{name}:1", bench.said.append)


@pytest.mark.usefixtures("no_engine")
def test_a_word_alone_is_asked_of_no_registry(bench: Bench) -> None:
    with pytest.raises(NotFound, match="there is no image defalt here"):
        bench.store.ensure("defalt", bench.said.append)
    assert bench.said == []


@pytest.mark.docker
def test_a_docker_image_by_name(bench: Bench, tmp_path: Path, docker_engine: str) -> None:
    """By its name, again, under another name, and as an archive of the same image; the engine keeps no container of
    it."""
    name = f"snapshotd-test-images-{os.getpid()}"
    client = docker.DockerClient(base_url=docker_engine)
    before = {container.id for container in client.containers.list(all=True)}
    volumes = {volume.id for volume in client.volumes.list()}
    changes = ["ENV A=b=c", "WORKDIR /srv", "VOLUME /data", 'ENTRYPOINT ["/bin/evil"]']
    try:
        client.api.import_image_from_data(ROOT, repository=name, tag="1", changes=changes)
        image = bench.store.ensure(f"{name}:1", bench.said.append)
        root = bench.root(image)
        assert (image.name, image.workdir) == (f"{name}:1", "/srv")
        assert dict(image.env)["A"] == "b=c"
        assert (root / "etc/os-release").read_text() == "ID=test"
        assert not (root / ".dockerenv").exists()
        assert bench.store.ensure(f"{name}:1", bench.said.append) == image
        assert bench.take(f"docker:{name}:1", "other").source_id == image.source_id
        with open(tmp_path / "saved.tar", "wb") as f:
            for chunk in client.images.get(f"{name}:1").save():
                f.write(chunk)
        assert bench.take(tmp_path / "saved.tar", f"{name}:1") == image
        bench.store.remove("other")
        bench.store.remove(f"{name}:1")
        again = bench.take(tmp_path / "saved.tar", "again")
        assert (bench.root(again) / "etc/os-release").read_text() == "ID=test"
        with pytest.raises(NotFound, match="docker pull no-such-image:9"):
            bench.take("no-such-image:9")
    finally:
        client.images.remove(f"{name}:1", force=True)
        assert {container.id for container in client.containers.list(all=True)} <= before
        assert {volume.id for volume in client.volumes.list()} <= volumes
        client.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(bench: Bench, path: Path, data: bytes, match: str) -> None:
    path.write_bytes(data)
    with pytest.raises(SnapshotdError, match=match):
        bench.take(path)
    assert bench.store.list() == []
    assert bench.left() == []


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"proc": b"-> /etc"}, "/proc of the image is not a real directory"),
        ({"dev": b"file"}, "/dev of the image is not a real directory"),
        ({"sys": b"-> dev"}, "/sys of the image"),
        ({"run": b"-> /"}, "/run of the image"),
        ({"run": None, "run/snapshotd": b"-> /etc"}, "/run/snapshotd of the image"),
        ({"etc": b"-> /etc"}, "/etc of the image"),
        ({"etc": None, "etc/hosts": b"-> /etc/shadow"}, "/etc/hosts of the image"),
        ({"workspace": b"-> /"}, "/workspace of the image"),
        ({"../x": b"1"}, r"contains `\.\.`"),
    ],
)
def test_hostile_roots(bench: Bench, tmp_path: Path, files: dict[str, bytes | None], match: str) -> None:
    refused(bench, tmp_path / "x.tar", tar_of(files), match)


def test_damaged_archives(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    refused(bench, path, b"", "empty")
    refused(bench, path, b"hello", "cut off")
    refused(bench, path, b"hello" * 1000, "not a tar")
    refused(bench, path, gzip.compress(ROOT)[:-20], "decompressed|cut off")
    refused(bench, path, gzip.compress(ROOT)[:100] + b"\0" * 50, "decompressed|cut off|not a tar")
    refused(bench, path, lzma.compress(ROOT)[:-40], "decompressed|cut off")
    refused(bench, path, zstandard.compress(ROOT)[:-10], "decompressed|cut off")
    refused(bench, path, tar_of({"manifest.json": b"[]"}), "holds 0 images")
    refused(bench, path, tar_of({"manifest.json": b"[" * 100_000}), "not JSON")
    refused(bench, path, tar_of({"manifest.json": b" " * (5 << 20)}), "larger than")
    refused(bench, path, tar_of({"oci-layout": b"{}"}), "index.json|manifest.json is missing")
    refused(
        bench,
        path,
        tar_of({"index.json": b'{"manifests": [{"digest": "sha256:../../../../etc/passwd"}]}'}),
        "not a sha256 digest",
    )
    refused(bench, path, docker_archive(Env="x"), "Env is not a list")
    refused(bench, path, docker_archive(WorkingDir="relative"), "working directory")


def test_blobs_that_are_not_what_they_are_called(bench: Bench, tmp_path: Path) -> None:
    for kind in ("layers", "config", "manifest"):
        files = oci_layout()
        index = json.loads(files["index.json"] or b"")
        inner = json.loads(files["blobs/sha256/" + index["manifests"][0]["digest"][7:]] or b"")
        name = "blobs/sha256/" + inner["manifests"][2]["digest"][7:]
        if kind != "manifest":
            found = json.loads(files[name] or b"")[kind]
            name = "blobs/sha256/" + (found[0] if kind == "layers" else found)["digest"][7:]
        other = (
            gzip.compress(tar_of({"etc": None, "etc/evil": b"1"}))
            if kind == "layers"
            else (files[name] or b"").replace(b":", b": ", 1)
        )
        refused(bench, tmp_path / "x.tar", tar_of({**files, name: other}), "digest")
        refused(bench, tmp_path / "x.tar", tar_of({k: v for k, v in files.items() if k != name}), "missing")


def test_another_machines_image(bench: Bench, tmp_path: Path) -> None:
    another = "arm64" if MACHINE == "amd64" else "amd64"
    data = config_of(LAYERS).replace(f'"{MACHINE}"'.encode(), f'"{another}"'.encode())
    names = [f"{sha(layer)}/layer.tar" for layer in LAYERS]
    listed = json.dumps([{"Config": f"{sha(data)}.json", "Layers": names}]).encode()
    archive = tar_of({**dict(zip(names, LAYERS, strict=True)), f"{sha(data)}.json": data, "manifest.json": listed})
    refused(bench, tmp_path / "x.tar", archive, "cannot run")


def test_sources_that_are_nothing(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file or folder"):
        bench.take(tmp_path / "missing.tar")
    with pytest.raises(UsageError, match="neither a folder nor a regular file"):
        bench.take("/dev/null")
    with pytest.raises(UsageError, match="empty"):
        bench.take("")
    with pytest.raises(UsageError, match="image's name"):
        bench.take(tmp_path, "a b\n")
    with pytest.raises(NotFound, match="no recipe"):
        bench.store.build("no-such-recipe", None, bench.said.append)


def test_a_missing_image_without_an_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(NotFound, match=r"no image nosuch here.*default.*image import"):
        bench.store.ensure("nosuch", bench.said.append)


def test_rubbish_of_a_crash_is_removed_at_the_next_start(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(ROOT)
    image = bench.take(tmp_path / "a.tar")
    for name in (".tmp-" + "0" * 32, "1" * 32):
        (bench.folder / "layers/images" / name / "root/etc").mkdir(parents=True)
    bench.open()
    assert os.listdir(bench.folder / "layers/images") == [image.id]


# -- building ----------------------------------------------------------------------------------------------------------


def manifest(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything a tree is, modification times to the nanosecond included."""
    found: dict[str, tuple[object, ...]] = {}
    for base, directories, names in os.walk(root):
        for name in [".", *directories, *names] if base == str(root) else directories + names:
            path = Path(base, name)
            st = path.lstat()
            content: object = ""
            if stat.S_ISREG(st.st_mode):
                content = sha(path.read_bytes())
            elif stat.S_ISLNK(st.st_mode):
                content = os.readlink(path)
            attributes = tuple(
                sorted(
                    (x, os.getxattr(path, x, follow_symlinks=False)) for x in os.listxattr(path, follow_symlinks=False)
                )
            )
            found[os.path.relpath(path, root)] = (
                st.st_mode,
                st.st_uid,
                st.st_gid,
                st.st_mtime_ns,
                st.st_rdev,
                content,
                attributes,
            )
    return found


def packages(root: Path) -> bytes:
    """Their names and versions, as dpkg has them."""
    return (root / "var/lib/dpkg/status").read_bytes()


@pytest.fixture(scope="module")
def built(run_folder: Path) -> Iterator[Bench]:
    """The essential image, built for the tests below and for those of other files."""
    bench = Bench(built_images.minimal(run_folder))
    bench.said += json.loads((bench.folder / built_images.SAID).read_text())
    yield bench
    bench.catalog.close()


def test_a_built_image_runs_python_and_holds_nothing_of_the_host(built: Bench) -> None:
    root = built.root(built.store.find(built_images.RECIPE))
    said = subprocess.run(
        ["chroot", root, "python3", "-B", "-c", "print(6 * 7)"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "42\n"
    assert list((root / "dev").iterdir()) == []
    assert (root / "etc/hostname").read_bytes() == b""
    assert (root / "etc/resolv.conf").read_bytes() == b""
    assert not (root / "var/lib/apt/lists").exists() or list((root / "var/lib/apt/lists").iterdir()) == []
    assert any("installing essential packages" in line for line in built.said)


def test_an_image_of_this_machines_programs_is_there_at_once(bench: Bench) -> None:
    """Python with its libraries, a shell and tools, all of which work; nothing of /etc, and no program is another
    user's."""
    image = bench.store.ensure("minimal", bench.said.append)
    root = bench.root(image)
    assert bench.said == ["making the image minimal of this machine's own programs"]
    program = (
        "import asyncio, bz2, ctypes, hashlib, json, lzma, sqlite3, ssl, subprocess, zlib, pwd, socket\n"
        "assert pwd.getpwuid(0).pw_shell == '/bin/sh' and socket.getaddrinfo('127.0.0.1', 80)\n"
        "print(subprocess.run(['bash', '-c', 'seq 3 | sort -r | sed s/^/=/ | paste -s | awk {print\\$2}'], "
        "capture_output=True, text=True))\n"
        "import pip"
    )
    said = subprocess.run(
        ["chroot", root, "python3", "-B", "-c", program],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert "stdout='=2\\n', stderr=''" in said.stdout
    assert said.stderr.endswith("No module named 'pip'\n")
    script = [
        "chroot",
        root,
        "/bin/sh",
        "-c",
        "printf '#!/usr/bin/env python3\\nprint(1)' > /tmp/x; chmod +x /tmp/x; /tmp/x",
    ]
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout == "1\n"
    names = {path.name for path in (root / "etc").iterdir()}
    assert names <= {
        *("passwd", "group", "nsswitch.conf", "ld.so.conf", "ld.so.cache", "alternatives"),
        *("hosts", "hostname", "resolv.conf"),
    }
    assert not {path.name for path in (root / "usr/lib").rglob("*")} & {"site-packages", "dist-packages", "test"}


def test_no_program_of_this_machine_acts_for_another_user(tmp_path: Path) -> None:
    for name, mode in (("program", 0o6755), ("closed", 0o700)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
        os.chown(tmp_path / name, 1234, 1234)
        (tmp_path / name).chmod(mode)  # a change of the owner takes the bits away
    found = machine.Content({}, {})
    machine._take(tmp_path / "program", found)
    machine._take(tmp_path / "closed", found)
    assert list(found.files) == [tmp_path / "program"], "what others may not read stays out"
    (root := tmp_path / "root").mkdir()
    machine.build_root(found, root)
    st = (root / (tmp_path / "program").relative_to("/")).stat()
    assert (st.st_uid, st.st_gid, stat.S_IMODE(st.st_mode)) == (0, 0, 0o755)


@pytest.mark.long  # test_an_image_of_this_machines_programs_is_there_at_once
def test_the_programs_are_taken_again_after_an_upgrade(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench.store.build("minimal", None, bench.said.append)
    assert bench.store.build("minimal", None, bench.said.append) == first
    found = machine.content()
    path = next(iter(found.files))
    found.files[path] = (path.parent).stat()  # another size and time
    monkeypatch.setattr(machine, "content", lambda: found)
    assert bench.store.build("minimal", None, bench.said.append).id != first.id


@pytest.mark.long  # minutes of packages
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("recipe", "commands"),
    [
        ("node", []),
        ("claude", [(["claude", "--version"], "2.1.197")]),
        ("codex", [(["codex", "--version"], "codex-cli 0.169.0")]),
    ],
)
def test_the_images_with_node_run_their_programs(
    tmp_path: Path, recipe: str, commands: list[tuple[list[str], str]]
) -> None:
    bench = Bench(tmp_path / recipe)
    root = bench.root(bench.store.build(recipe, None, bench.said.append))
    assert list((root / "tmp").iterdir()) == []
    assert not (root / "root/.npm").exists()
    mounts = 'mount --bind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'  # Bun needs both
    inside = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", mounts, str(root)]
    for words, says in ((["node", "-e", "console.log(6 * 7)"], "42\n"), (["npm", "--version"], "9."), *commands):
        said = subprocess.run([*inside, *words], capture_output=True, text=True, check=True)
        assert said.stdout.startswith(says)
    bench.catalog.close()


def test_an_unchanged_recipe_is_not_built_again(built: Bench) -> None:
    image = built.store.find(built_images.RECIPE)
    assert built.store.build(built_images.RECIPE, None, built.said.append) == image
    assert "unchanged" in built.said[-1]


@pytest.mark.long  # half a minute of packages; `make setup` builds by recipes, too
def test_a_recipe_of_ones_own_and_building_twice_gives_one_tree(
    built: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of essential packages with a tree of files and a customize script: what they add is there, and all else is the first
    build's. The script's programs trust whom this machine trusts. The first may be kept from an earlier run, so it is
    made again if Debian has other packages by now."""
    (tmp_path / "authorities").write_text("an authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authorities"))
    recipe = tmp_path / "mine"
    (recipe / "files/etc").mkdir(parents=True)
    (recipe / "files/etc/motd.own").write_text("hello")
    (recipe / "files/bin").mkdir(parents=True)  # a link in every Debian root
    (recipe / "files/bin/tool").write_text("#!/bin/sh\necho tool\n")
    (recipe / "files/bin/tool").chmod(0o700)
    os.chown(recipe / "files/etc/motd.own", 1234, 1234)
    (recipe / "customize").write_text("#!/bin/sh\nset -e\ntool > /made\ngrep authority $NODE_EXTRA_CA_CERTS\n")
    (recipe / "customize").chmod(0o755)
    settings = (
        (recipes.shipped()[built_images.RECIPE] / "image.toml")
        .read_text()
        .replace("[env]", 'workdir = "/srv"\n[env]\nA = "b"')
    )
    (recipe / "image.toml").write_text(settings)
    other = Bench(tmp_path / "again")
    image = other.store.build(str(recipe), "own", other.said.append)
    root = other.root(image)
    assert (image.name, image.workdir, image.env) == ("own", "/srv", (("A", "b"), ("LANG", "C.UTF-8")))
    assert (root / "made").read_text() == "tool\n"
    assert ((root / "etc/motd.own").stat().st_uid, stat.S_IMODE((root / "usr/bin/tool").stat().st_mode)) == (0, 0o755)
    assert os.readlink(root / "bin") == "usr/bin"
    same = built
    if packages(root) != packages(built.root(built.store.find(built_images.RECIPE))):
        same = Bench(tmp_path / "first")
        same.store.build(built_images.RECIPE, None, same.said.append)
    first, second = manifest(same.root(same.store.find(built_images.RECIPE))), manifest(root)
    assert set(second) - set(first) == {"made", "etc/motd.own", "usr/bin/tool"}
    assert {path: (first[path], second.get(path)) for path in first if first[path] != second.get(path)} == {}
    before = recipes.load_recipe(recipe).source_id
    (recipe / "files/etc/motd.own").write_text("bye")
    assert recipes.load_recipe(recipe).source_id != before
    assert other.left() == []
    other.catalog.close()


@pytest.mark.long  # how the message is made: tests/unit/images/test_recipes.py
def test_a_package_that_does_not_exist(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/image.toml").write_text('variant = "essential"\npackages = ["no-such-package-anywhere"]\n')
    with pytest.raises(UsageError, match=r"recipe bad cannot be built: .*no-such-package-anywhere"):
        bench.store.build(str(tmp_path / "bad"), None, bench.said.append)
    assert bench.store.list() == []
