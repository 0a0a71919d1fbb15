"""What a daemon may leave behind, looked for from outside: containers, mounts, cgroups, loop devices, processes,
layers."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from itertools import islice
from pathlib import Path

from tests.way import run_root


def nothing_left(state_dir: Path, *, running: bool) -> None:
    """Fail if something is left. Polls: a spare container that is just being made has a cgroup before it has a
    process."""
    deadline = time.monotonic() + 60
    while found := leftovers(state_dir, running=running):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def leftovers(state_dir: Path, *, running: bool) -> list[str]:
    """Everything of this state directory's instance that belongs to no live sandbox. With `running`, a daemon may serve
    it (and have its layer image mounted); without, nothing at all may be left."""
    found: list[str] = []
    instance = instance_of(state_dir)
    live = _live_containers(instance) if running else set()
    for hierarchy in cgroups(f"snapshotd-{instance}"):
        if hierarchy.name.removeprefix(f"snapshotd-{instance}")[:1].isalnum():
            continue  # another instance, whose name begins with this one's
        found += [f"cgroup {c}" for c in _directories(hierarchy) if c.name not in live]
        if not running:
            found.append(f"cgroup {hierarchy}")
    mounts = Path("/proc/self/mountinfo").read_text()
    found += [f"mount {line.split()[4]}" for line in mounts.splitlines() if str(state_dir) in line]
    attached = [p for p in Path("/sys/block").glob("loop*/loop/backing_file") if str(state_dir) in text_of(p)]
    if len(attached) > (1 if running else 0):
        found += [f"loop device {p.parts[3]}" for p in attached]
    containers = run_root() / instance / "c"
    if containers.exists():
        found += [f"run directory {c}" for c in containers.iterdir() if c.name not in live]
    if not running:
        found += [f"process {line}" for line in _processes(str(state_dir), f"/run/snapshotd/{instance}/")]
    return found


def cgroups(part: str) -> list[Path]:
    """Every cgroup with this in its name. Others come and go meanwhile, of this daemon and of its neighbours:
    `Path.glob` would raise."""
    return [Path(base, name) for base, names, _ in os.walk("/sys/fs/cgroup") for name in names if part in name]


def _directories(path: Path) -> list[Path]:
    """Those that lie in a directory; none if it has just gone."""
    return [path / name for _, names, _ in islice(os.walk(path), 1) for name in names]


def text_of(path: Path) -> str:
    """What a file says; nothing if it has just gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def instance_of(state_dir: Path) -> str:
    """The name of a state directory's instance."""
    with sqlite3.connect(f"file:{state_dir}/catalog.db?mode=ro", uri=True) as db:
        (name,) = db.execute("select value from meta where key = 'instance'").fetchone()
    db.close()
    return str(name)


def _live_containers(instance: str) -> set[str]:
    """Containers whose init runs: those of live sandboxes, and spares that were made ahead."""
    result = subprocess.run(["pgrep", "-af", "snapshotd/share/init"], capture_output=True, text=True, check=False)
    live = set()
    for line in result.stdout.splitlines():
        try:
            cgroup = Path(f"/proc/{line.split()[0]}/cgroup").read_text()
        except OSError:
            continue
        live |= {
            part
            for entry in cgroup.splitlines()
            if f"snapshotd-{instance}/" in entry
            for part in [entry.rsplit("/", 1)[1]]
        }
    return live


def _processes(*places: str) -> list[str]:
    """Those whose command line names one of the places: the daemon and its children, and the keeper, which knows only
    its run directory."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if any(place in command for place in places) and "pytest" not in command:
                found.append(f"{entry} {command}")
    return found
