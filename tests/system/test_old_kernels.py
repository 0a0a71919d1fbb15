"""The product on kernels that people have, with cgroups of version 2: Debian 12's own (6.1) and its newer one (6.12)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests import guest
from tests.capabilities import require

KERNELS = (guest.OLDEST, "6.12")
_TOUR = """
set -eux
export SNAPSHOTD_WARM=0
until snapshotd ls; do echo waiting; done  # its start takes more than a minute on a busy machine
snapshotd image import /root/small.tar --name default
snapshotd create --name box
snapshotd exec box -- sh -c 'mkdir -p d/e && echo one > d/f && ln d/f h && chown 5:6 d/e'
snapshotd tag box first
snapshotd exec box -- sh -c 'mv d d2 && echo two >> d2/f'
snapshotd fork first --name other
snapshotd exec other -- sh -c 'mv d d3 && cat d3/f h'
snapshotd exec box --detach -- sh -c 'exec 3>held; while :; do echo x >&3; sleep 0.1; done'
snapshotd exec box -- sh -c 'until [ -s held ]; do sleep 0.1; done; echo changed > h'
snapshotd log box
snapshotd diff first box
snapshotd rewind box first
snapshotd exec box -- sh -c '[ "$(cat d/f)" = one ] && [ ! -e d2 ]'
snapshotd restore other --path /workspace --to /root/out
[ "$(cat /root/out/d3/f)" = one ]
snapshotd export other --output /root/other.bundle
snapshotd rm --force other
snapshotd import /root/other.bundle
snapshotd check --read-data
snapshotd prune --keep-last 1 --dry-run
snapshotd doctor
grep . /sys/fs/cgroup/cgroup.controllers
snapshotd daemon --stop
echo TOUR OK
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The smallest root with a shell, as an archive."""
    path = tmp_path / "tiny.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("bin", "tmp", "workspace"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        archive.add("/bin/busybox", "bin/busybox")
        for name in ("sh", "mkdir", "ln", "chown", "mv", "cat"):
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
    return path


@pytest.fixture(scope="module")
def small(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of a few programs, as an archive."""
    path = tmp_path_factory.mktemp("guest") / "small.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(small_root, ".")
    return path


_IN_A_CONTAINER = """
set -eu
echo '+cpu +memory +pids' > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/container
echo 0 > /sys/fs/cgroup/container/cgroup.procs
exec unshare --cgroup --mount sh -eu /root/inside
"""
_INSIDE = """
umount /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
[ "$(cat /proc/self/cgroup)" = 0::/ ]
SNAPSHOTD_WARM=0 python3 /root/smoke.py
"""
"""In a cgroup of its own, which is the top of those that it sees: where a container's processes are."""
_SMOKE = """
from pathlib import Path
from snapshotd.client import Sandbox, Snapshot, Snapshotd, SnapshotdError
from tests import forked

def steps():
    client, started = Snapshotd(), False
    while not started:
        try:
            started = bool(client.status())
        except SnapshotdError as exc:
            print(exc.message, flush=True)  # its start takes long on a busy machine
    client.import_image("/root/tiny.tar", name="default")
    box = Sandbox.create(name="box", client=client)
    first = box.exec("mkdir -p d/e && echo one > d/f && ln d/f h && chown 5:6 d/e", check=True).snapshot_id
    box.exec("mv d d2 && echo two >> d2/f", check=True)
    (other,) = Snapshot.get(first, client=client).fork(1)
    other.exec("mv d d3 && cat d3/f h", check=True)
    groups = [path for path in Path("/sys/fs/cgroup").glob("snapshotd-*/*") if path.is_dir()]
    assert len(groups) == 2, groups
    assert len({(path / "memory.max").read_text() for path in groups} - {"max\\n"}) == 1
    box.rewind(first)
    box.exec('[ "$(cat d/f)" = one ] && [ ! -e d2 ]', check=True)
    other.head().restore("/root/out", path="/workspace")
    assert Path("/root/out/d3/f").read_text() == "one\\n"

with forked.daemons():  # interpreters of their own, for the daemon and its children, would import for a minute
    steps()
print("SMOKE OK")
"""


@pytest.mark.timeout(600)
def test_what_a_sandbox_does(tiny: Path) -> None:
    """The heart of the tour, in one process, in a container."""
    require("qemu")
    files = {"/root/tiny.tar": tiny}
    for name, text in (("smoke.py", _SMOKE), ("inside", _INSIDE)):
        files[f"/root/{name}"] = tiny.with_name(name)
        files[f"/root/{name}"].write_text(text)
    ended = guest.run(guest.OLDEST, _IN_A_CONTAINER, timeout_s=500, files=files)
    assert ended.status == 0, ended.said[-8000:]
    assert "SMOKE OK" in ended.said


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_tour(kernel: str, small: Path) -> None:
    require("qemu")
    ended = guest.run(kernel, _TOUR, timeout_s=1100, files={"/root/small.tar": small})
    assert ended.status == 0, ended.said[-8000:]
    assert "TOUR OK" in ended.said


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param("tests/model/test_overlay_view.py tests/model/test_overlay_walk.py", id="overlays"),
        pytest.param("tests/unit/layers tests/unit/kernel -k 'not git and not patch and not oracles'", id="layers"),
        pytest.param("tests/system/test_cgroups.py tests/contract/test_runtime.py -k 'not docker'", id="sandboxes"),
    ],
)
def test_what_holds_on_the_newest_kernel(kernel: str, tests: str) -> None:
    """Overlays, times and links; and on cgroups of version 2, sandboxes and their commands as runc makes them."""
    require("qemu")
    script = f"python3 -m pytest -q --color no -p no:cacheprovider --basetemp /var/tmp/pytest --timeout 600 {tests}"
    ended = guest.run(kernel, script, timeout_s=2000, files={"/usr/bin/kill": Path("/usr/bin/kill")})
    assert ended.status == 0, ended.said[-8000:]
