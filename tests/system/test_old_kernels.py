"""The product on kernels that people have, with cgroups of version 2: Debian 12's own (6.1) and its newer one (6.12)."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from tests import guest
from tests.capabilities import require

KERNELS = (guest.OLDEST, "6.12")
README = Path(__file__).parents[2] / "README.md"
_WAIT = """
import os, time

@tool
def wait():
    while not os.path.exists("go"):
        time.sleep(0.1)

if len(sys.argv) == 1:
    print("it waits", flush=True)
    wait()
"""
_TOUR = r"""
set -eux
cd "$HOME"
export SNAPSHOTD_WARM=0 TERM=dumb
before=" $(cd /proc && echo *) "
snapshotd() { $AS /usr/local/bin/snapshotd "$@"; }
started() { until snapshotd ls; do echo waiting; done; }  # it takes more than a minute on a busy machine
told() { until grep "$2" "$1"; do sleep 1; done 2> /dev/null; }

grep . /sys/fs/cgroup/cgroup.controllers
chmod 666 /dev/fuse /dev/net/tun  # as udev does
started
snapshotd doctor
$AS mkdir shop
echo 'def total(price): return price * 1.19' > shop/shop.py
snapshotd run --image minimal --workspace shop --name tax /tour/agent.py 2>&1 | tee run &
told run 'it waits'
all=
for each in /proc/[0-9]*; do
    case $before in *" ${each#/proc/} "*) continue ;; esac
    grep -q witness_main "$each/cmdline" || all="$all ${each#/proc/}"
done
kill -STOP $all || true  # or the daemon would live to see the agent's end
kill -KILL $all || true
wait
started
snapshotd ls | grep interrupted
(snapshotd resume tax && echo it has ended) 2>&1 | tee resume &
told resume 'it waits'
snapshotd exec tax -- touch go
told resume 'it has ended'
snapshotd exec tax -- grep 1.16 shop.py
snapshotd tag "$(snapshotd log tax --json | python3 -c 'import json, sys; print(json.load(sys.stdin)[1]["id"])')" before
snapshotd fork before --n 2 --name try -- '1.0{index}'
snapshotd attach try-1
snapshotd exec try-1 -- grep 1.01 shop.py
snapshotd exec --snapshot before -- grep 1.19 shop.py
snapshotd rewind tax before
snapshotd exec tax -- sh -c 'grep 1.19 shop.py && touch go'
snapshotd resume tax
snapshotd exec tax -- grep 1.16 shop.py

snapshotd create --image minimal --name box
snapshotd exec box -- sh -c 'mkdir -p d/e && echo one > d/f && ln d/f h && chown '$OWNER' d/e'
snapshotd tag box first
snapshotd exec box -- sh -c 'mv d d2 && echo two >> d2/f'
snapshotd fork first --name other
snapshotd exec other -- sh -c 'mv d d3 && cat d3/f h'
snapshotd exec box --detach -- sh -c 'exec 3>held; while :; do echo x >&3; sleep 0.1; done'
snapshotd exec box -- sh -c 'until [ -s held ]; do sleep 0.1; done; echo changed > h'
snapshotd log box
snapshotd diff first box
snapshotd rewind box first
snapshotd exec --wait stored box -- sh -c '[ "$(cat d/f)" = one ] && [ ! -e d2 ] && [ "$(stat -c %u:%g d/e)" = '$OWNER' ]'
snapshotd restore other --path /workspace --to out
[ "$(cat out/d3/f)" = one ]
snapshotd export other --output other.bundle
snapshotd rm --force other
snapshotd prune --keep-last 1 --force --grace 0s
snapshotd log box | grep pruned
snapshotd import other.bundle
snapshotd check --read-data
snapshotd exec box -- cat h
snapshotd daemon --stop
echo TOUR OK
"""
"""A script of root's; the commands are those of the user that `AS` becomes. All that has begun since the script did is
killed, but for the process that syncs layers when the daemon is gone: without it captured snapshots are lost
(docs/limits.md)."""
_PERSON = "HOME=/home/person AS='setpriv --reuid=person --regid=person --init-groups --inh-caps=-all'"
_USERS = {
    "root": "export AS= OWNER=5:6",
    "range": f"""
useradd --create-home person
grep person /etc/subuid
export OWNER=5:6 {_PERSON}
""",
    "one-id": f"""
useradd --create-home -K SUB_UID_COUNT=0 -K SUB_GID_COUNT=0 person
if grep person /etc/subuid; then exit 1; fi
export OWNER=0:0 {_PERSON}
""",
}


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


@pytest.mark.timeout(1500)
def test_what_a_sandbox_does(tiny: Path) -> None:
    """The heart of the tour, in one process, in a container."""
    require("qemu")
    files = {"/root/tiny.tar": tiny}
    for name, text in (("smoke.py", _SMOKE), ("inside", _INSIDE)):
        files[f"/root/{name}"] = tiny.with_name(name)
        files[f"/root/{name}"].write_text(text)
    ended = guest.run(guest.OLDEST, _IN_A_CONTAINER, timeout_s=900, files=files)
    assert ended.status == 0, ended.said[-8000:]
    assert "SMOKE OK" in ended.said


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("user", _USERS)
def test_the_tour(kernel: str, user: str, tmp_path: Path) -> None:
    """README's agent, killed and resumed, forked and rewound; and what else a user does with files."""
    require("qemu")
    agent, (example,) = tmp_path / "agent.py", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    agent.write_text(example + _WAIT)
    ended = guest.run(kernel, f"set -eu\n{_USERS[user]}\n{_TOUR}", timeout_s=1900, files={"/tour/agent.py": agent})
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
