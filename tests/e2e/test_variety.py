"""One nasty entry for everything a snapshot claims to keep, through capture, store, evict, restore, mount and a cold
fork: it equals the original for four oracles that know nothing of each other, and what a target cannot hold is named in
the report of the restore.

With the Docker driver the tree is made from outside with all rights of the machine's root, so that it has every entry.
With runc it is made inside the sandbox, by what root is allowed there.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import oracles, variety
from tests.capabilities import require
from tests.e2e.prepared import daemon_on
from tests.e2e.support import Snap, wait_until

KINDS = {"xfs": ("mkfs.xfs", "-q"), "ext4": ("mkfs.ext4", "-q"), "btrfs": ("mkfs.btrfs", "-q"), "tmpfs": ()}
"""File systems to restore to, and how they are made."""
LONG = ("xfs", "btrfs", "tmpfs")
"""Those of the long set: another file system than the source's, with its warnings, is ext4."""
TREES = (b"tree", b"deep")
"""Below /workspace: everything that common tools can read, and what is deeper than PATH_MAX."""
Manifest = dict[bytes, variety.Fact]

MAKE = """
import os, sys
from pathlib import Path
import variety
refused = set()

def lenient(name):
    call = getattr(os, name)
    def attempt(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except PermissionError:
            refused.add(f"{name} {args[1]}" if name == "setxattr" else name)
        except FileNotFoundError:
            if name != "link" or "mknod" not in refused:
                raise
    setattr(os, name, attempt)

lenient("mknod"), lenient("link"), lenient("setxattr")
variety.make(Path("/workspace/tree"), deep=False)
variety.make_deep(Path("/workspace/deep"))
print(sorted(refused))
"""
MANIFEST = """
import base64, dataclasses, zlib
from pathlib import Path
import variety
found = {}
for name in (b"tree", b"deep"):
    for path, fact in variety.manifest(Path("/workspace") / name.decode()).items():
        found[name + b"/" + path if path else name] = dataclasses.astuple(fact)
print(base64.b64encode(zlib.compress(repr(found).encode())).decode())
"""
REFUSED = {"mknod", "setxattr trusted.own", "setxattr security.own", "setxattr security.selinux"}
"""What root of a sandbox may not do, at the most."""


@dataclass(frozen=True)
class Original:
    """The trees as they were in the running sandbox: their manifest, and a copy of `tree` on a disk with what the tools
    say of it."""

    snapshot: str
    manifest: Manifest
    copy: Path
    spec: bytes
    blind: set[bytes]
    archive: Path


@pytest.fixture(scope="module")
def cold(minimal_state: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """A daemon that keeps no layer it need not keep."""
    require("root", "oracles", "xfs", "fuse")
    with daemon_on(
        minimal_state, tmp_path_factory.mktemp("variety") / "state", {**engine_env, "SNAPSHOTD_LAYER_BUDGET": "0"}
    ) as snap:
        yield snap


@dataclass(frozen=True)
class Disk:
    """A file system: where it is for the daemon, and the same place as the test sees it."""

    theirs: Path
    ours: Path


@pytest.fixture(scope="module")
def disks(cold: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Disk]]:
    """A file system of each kind. Mounted in the daemon's namespace, where no other daemon's keeps it in use, and gone
    with it."""
    pid, base, found = cold.daemon_pid(), tmp_path_factory.mktemp("disks"), {}
    for kind, make in KINDS.items():
        if make and shutil.which(make[0]) is None:
            continue
        image, place = base / f"{kind}.disk", base / kind
        place.mkdir()
        source = ["-t", "tmpfs", "-o", "size=300m", "none"]
        if make:
            with image.open("wb") as f:
                f.truncate(1 << 30)
            _run(*make, image)
            source = ["-o", "loop", str(image)]
        _run("nsenter", f"--mount=/proc/{pid}/ns/mnt", "mount", *source, place)
        found[kind] = Disk(place, Path(f"/proc/{pid}/root{place}"))
    yield found
    for image in base.glob("*.disk"):
        image.unlink()


@pytest.fixture(scope="module")
def original(
    disks: dict[str, Disk],
    cold: Snap,
    runtime: str,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Original:
    """Captured, stored and evicted."""
    given = tmp_path_factory.mktemp("given")
    shutil.copy(variety.__file__, given / "variety.py")
    trajectory, _ = cold.create("--runtime", runtime, "--workspace", given)
    place = disks["xfs"].ours / runtime
    place.mkdir()
    archive = place / "original.tar"
    if runtime == "docker":
        workspace = _root(cold, trajectory, request.getfixturevalue("docker_engine")) / "workspace"
        variety.make(workspace / "tree", deep=False)
        variety.make_deep(workspace / "deep")
        snapshot = cold.sh(trajectory, "true")["snapshot"]
        manifest = _manifest(workspace)
        oracles.tar_of(workspace / "tree", archive)
        _run("cp", "-a", workspace / "tree", place / "copy")
    else:
        made = cold.json("exec", trajectory, "--", "python3", "-c", MAKE)
        assert {"mknod"} <= set(ast.literal_eval(made["stdout"])) <= REFUSED
        snapshot = made["snapshot"]
        manifest = _inside(cold, trajectory)
        pack = ["tar", "-C", "/workspace/tree", "--format=posix", "--xattrs", "--acls", "--sparse", "-cf", "-", "."]
        with archive.open("wb") as f:
            command = [sys.executable, "-m", "snapshotd", "exec", "-q", trajectory, "--", *pack]
            subprocess.run(command, env=cold.env, stdin=subprocess.DEVNULL, stdout=f, check=True, timeout=60)
        _restore(cold, snapshot, "--path", "/workspace/tree", "--to", disks["xfs"].theirs / runtime / "copy")
        os.chmod(place / "copy", manifest[b"tree"].mode)
    copied = _below(variety.manifest(place / "copy"), b"tree")
    sockets = set() if runtime == "docker" else _sockets(manifest)
    kept = {path: fact for path, fact in manifest.items() if path.split(b"/")[0] == b"tree" and path not in sockets}
    assert variety.difference(kept, copied) == ""
    cold("stop", trajectory, "--wait", "stored")
    wait_until(lambda: cold.json("df")["layer_bytes"] == 0, "all layers are evicted", pause_s=0.2)
    spec = oracles.mtree_spec(place / "copy")
    return Original(snapshot, manifest, place / "copy", spec, oracles.mtree(spec, place / "copy"), archive)


def _restore(cold: Snap, *args: str | Path) -> Any:
    """The report of a restore by a client that has the daemon's mounts."""
    enter = ["nsenter", f"--mount=/proc/{cold.daemon_pid()}/ns/mnt"]
    command = [*enter, sys.executable, "-m", "snapshotd", "restore", "--json", *map(str, args)]
    done = subprocess.run(command, env=cold.env, capture_output=True, stdin=subprocess.DEVNULL, timeout=cold.timeout_s)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS])
def test_restored(cold: Snap, original: Original, disks: dict[str, Disk], kind: str) -> None:
    if kind == "btrfs":
        require("btrfs")
    target = disks[kind].ours / "restored"
    report = _restore(cold, original.snapshot, "--path", "/workspace", "--to", disks[kind].theirs / "restored")
    os.chmod(target, 0o755)
    got = _manifest(target)
    lost = {path for path in original.manifest.keys() | got.keys() if original.manifest.get(path) != got.get(path)}
    shown = {path: _shown(path) for path in lost}
    unnamed = {path for path in lost if not any(warning.startswith(shown[path]) for warning in report["warnings"])}
    assert not unnamed, variety.difference(_only(original.manifest, unnamed), _only(got, unnamed))
    groundless = [warning for warning in report["warnings"] if not warning.startswith(tuple(shown.values()))]
    assert groundless == []
    sockets = _sockets(original.manifest)
    assert sockets <= lost
    if kind == "xfs":  # where it came from
        assert lost == sockets
    else:  # and only there access lists show a second time
        assert os.listxattr(target / "tree/capabilities_and_acls/acl") == ["system.posix_acl_access"]
    if kind == "ext4":
        assert b"tree/attributes/big value" in lost, "attributes have one block of 4 KiB there"
    named = {path.removeprefix(b"tree").lstrip(b"/") or b"." for path in lost if path.split(b"/")[0] == b"tree"}
    assert _differing(original, target / "tree") <= named
    _empty(target)
    target.rmdir()


@pytest.mark.long  # a mounted snapshot equals the original: system/test_fuse.py
def test_mounted(cold: Snap, original: Original, tmp_path: Path) -> None:
    cold("mount", tmp_path)
    try:
        shown = tmp_path / "snapshots" / original.snapshot / "workspace"
        assert variety.difference(original.manifest, _manifest(shown)) == ""
        missing_in_copy = {path.removeprefix(b"tree/") for path in _sockets(original.manifest)}
        assert _differing(original, shown / "tree") <= missing_in_copy
    finally:
        cold("umount", tmp_path)


@pytest.mark.long  # the same tree comes back: system/test_rebuilt_layer.py
def test_forked_while_cold(cold: Snap, original: Original, runtime: str, request: pytest.FixtureRequest) -> None:
    """Seen from the inside while it comes lazily, and again after it has moved over to real layers."""
    (fork,) = cold.json("fork", original.snapshot)["trajectories"]

    def seen() -> Manifest:
        if runtime == "docker":
            return _manifest(_root(cold, fork, request.getfixturevalue("docker_engine")) / "workspace")
        return _inside(cold, fork)

    assert variety.difference(original.manifest, seen()) == ""
    after = cold.sh(fork, "echo more > /workspace/more")["snapshot"]
    assert variety.difference(original.manifest, seen()) == ""
    cold("stop", fork, "--wait", "stored")
    assert {c["path"] for c in cold.json("diff", original.snapshot, after)} == {"/workspace/more"}
    cold("rm", "--force", fork)


def _differing(original: Original, copy: Path) -> set[bytes]:
    """What any of the three tools says of it."""
    return (
        oracles.rsync(original.copy, copy)
        | oracles.tar(original.archive, copy)
        | (oracles.mtree(original.spec, copy) - original.blind)
    )


def _shown(path: bytes) -> str:
    """How a warning of a restore begins that is about this path."""
    shown = ascii(os.fsdecode(path))
    return (shown if len(shown) <= 300 else shown[:150] + "..." + shown[-147:]) + " "


def _only(manifest: Manifest, paths: set[bytes]) -> Manifest:
    return {path: fact for path, fact in manifest.items() if path in paths}


def _sockets(manifest: Manifest) -> set[bytes]:
    found = {path for path, fact in manifest.items() if fact.kind == stat.S_IFSOCK}
    assert found
    return found


def _manifest(workspace: Path) -> Manifest:
    found: Manifest = {}
    for name in TREES:
        found |= _below(variety.manifest(workspace / os.fsdecode(name)), name)
    return found


def _below(facts: Manifest, name: bytes) -> Manifest:
    return {name + b"/" + path if path else name: fact for path, fact in facts.items()}


def _inside(snap: Snap, trajectory: str) -> Manifest:
    """What a program in the sandbox sees."""
    said = snap.json("exec", trajectory, "--", "python3", "-c", MANIFEST)["stdout"]
    rows = ast.literal_eval(zlib.decompress(base64.b64decode(said)).decode())
    return {path: variety.Fact(*row) for path, row in rows.items()}


def _root(snap: Snap, trajectory: str, engine: str) -> Path:
    """The root of a Docker sandbox, as its init has it now."""
    (info,) = [p for p in snap.json("ps") if p["trajectory"] == trajectory]
    docker = ("docker", "-H", engine)
    container = _run(*docker, "ps", "-q", "--filter", f"label=snapshotd.container={info['container']}")
    return Path(f"/proc/{_run(*docker, 'inspect', '--format', '{{.State.Pid}}', container)}/root")


def _empty(directory: Path) -> None:
    """`shutil.rmtree` does not get so deep."""
    _run("find", directory, "-mindepth", "1", "-maxdepth", "1", "-exec", "rm", "-rf", "{}", "+")


def _run(*command: str | Path) -> str:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, (command, result.stderr)
    return result.stdout.strip()
