"""One step of an agent, snapshotted by snapshotd, shadow git, restic, a btrfs snapshot and `docker commit`. `make
bench-compare`, or:

    python benchmarks/compare.py [--rounds 20] [--runtime runc] [--json FILE] [--dir DIR]

Every method gets the same workspace (20,000 files, 200 MB) and the same steps: new content for one file, then for 1,000
files. As root.

    step    the wait after the change. snapshotd: from the end of the tool's work to the return of its call in the sandbox,
            with a real daemon; the others: the whole command
    bytes   growth of the place where the method keeps snapshots, for each step. snapshotd: its packs, once the snapshots
            are stored (in the background; a step does not wait for it). btrfs: used space of its file system. docker: the
            size of the image over its base

Medians. A method whose program is missing is named as missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compare_change import KINDS, change, make

from snapshotd.client import Snapshotd

HERE = Path(__file__).parent
DEADLINE_S = 600
NEEDS = {"shadow git": "git", "restic": "restic", "btrfs snapshot": "mkfs.btrfs", "docker commit": "docker"}
Row = dict[str, dict[str, float]]
"""Kind of step to `step_ms` and `bytes`."""


def run(*command: str | Path, **more: Any) -> str:
    more = {"stdin": subprocess.DEVNULL, **more}
    env = {**os.environ, "RESTIC_PASSWORD": "benchmark"}
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, env=env, **more).stdout.decode()


def tree_bytes(path: Path) -> int:
    return sum(os.lstat(os.path.join(base, name)).st_size for base, _, names in os.walk(path) for name in names)


def steps(folder: Path, rounds: int, take: Callable[[int], object], used: Callable[[], int]) -> Row:
    """Change a folder on the host and take a snapshot of it, `rounds` times for each kind."""
    row: Row = {}
    take(0)
    for start, kind in enumerate(KINDS):
        before, seen = used(), []
        for number in range(rounds):
            change(folder, kind, number)
            begun = time.perf_counter()
            take(1 + start * rounds + number)
            seen.append((time.perf_counter() - begun) * 1e3)
        row[kind] = {"step_ms": statistics.median(seen), "bytes": (used() - before) / rounds}
    return row


def shadow_git(work: Path, workspace: Path, rounds: int) -> Row:
    """A bare repository beside the workspace, as agent tools keep one."""
    git = ["git", "--git-dir", work / "shadow.git", "-c", "user.name=b", "-c", "user.email=b@b", "-c", "gc.auto=0"]
    run("git", "init", "-q", "--bare", work / "shadow.git")

    def take(number: int) -> None:
        run(*git, "--work-tree", workspace, "add", "-A")
        run(*git, "--work-tree", workspace, "commit", "-q", "-m", str(number))

    return steps(workspace, rounds, take, lambda: tree_bytes(work / "shadow.git" / "objects"))


def restic(work: Path, workspace: Path, rounds: int) -> Row:
    repository = work / "restic"
    run("restic", "-q", "-r", repository, "init")
    command = ["restic", "-q", "--cache-dir", work / "cache", "-r", repository, "backup", "."]
    return steps(workspace, rounds, lambda _: run(*command, cwd=workspace), lambda: tree_bytes(repository))


def btrfs(work: Path, workspace: Path, rounds: int) -> Row:
    image, mount = work / "btrfs.img", work / "btrfs"
    with open(image, "wb") as file:
        file.truncate(8 << 30)
    run("mkfs.btrfs", "-q", image)
    mount.mkdir()
    run("mount", "-o", "loop", image, mount)
    try:
        run("btrfs", "subvolume", "create", mount / "live")
        run("cp", "-a", f"{workspace}/.", mount / "live")

        def used() -> int:
            run("btrfs", "filesystem", "sync", mount)
            status = os.statvfs(mount)
            return (status.f_blocks - status.f_bfree) * status.f_frsize

        def take(number: int) -> None:
            run("btrfs", "subvolume", "snapshot", "-r", mount / "live", mount / f"s{number}")

        return steps(mount / "live", rounds, take, used)
    finally:
        run("umount", mount)


def docker(work: Path, workspace: Path, rounds: int, root_tar: Path) -> Row:
    """The workspace is in the image, so that a commit holds what the container changed since it started."""
    del work
    base = run("docker", "import", root_tar).strip()
    made = [base]
    start = ["docker", "run", "-d", "--network", "none", "-w", "/workspace"]
    first = run(*start, base, "sleep", "infinity").strip()
    containers = [first]
    try:
        run("docker", "cp", f"{workspace}/.", f"{first}:/workspace")
        run("docker", "cp", HERE / "compare_change.py", f"{first}:/change.py")
        base = run("docker", "commit", first).strip()
        made.append(base)
        row: Row = {}
        for kind in KINDS:
            container = run(*start, base, "sleep", "infinity").strip()
            containers.append(container)
            seen, sizes = [], []
            for number in range(rounds):
                code = f"import sys; sys.path[:0] = ['/']; import change; change.change('.', {kind!r}, {number})"
                run("docker", "exec", container, "python3", "-c", code)
                begun = time.perf_counter()
                made.append(run("docker", "commit", container).strip())
                seen.append((time.perf_counter() - begun) * 1e3)
                sizes.append(image_bytes(made[-1]) - image_bytes(base))
            row[kind] = {"step_ms": statistics.median(seen), "bytes": statistics.median(sizes)}
        return row
    finally:
        for container in containers:
            run("docker", "rm", "-f", container)
        # An image goes with the last one that was made of it, and is then no longer found.
        subprocess.run(["docker", "rmi", "-f", *reversed(made)], check=False, capture_output=True)


def image_bytes(image: str) -> int:
    return int(run("docker", "image", "inspect", "-f", "{{.Size}}", image))


def snapshotd(client: Snapshotd, workspace: Path, rounds: int, runtime: str) -> Row:
    """Two runs of an agent from the same workspace. The first trajectory stores the workspace, which does not count."""
    row: Row = {}
    before = 0.0
    for kind, times in {"": 0, **dict.fromkeys(KINDS, rounds)}.items():
        args = [kind or next(iter(KINDS)), str(times)]
        agent = HERE / "compare_change.py"
        trajectory = client.run(agent=agent, args=args, runtime=runtime, workspace=workspace).id
        events = client.events(trajectory)
        output = b"".join(b64decode(event["data_b64"]) for event in events if event["event"] == "output")
        client.flush(trajectory)
        stored = client.usage().repository_bytes
        if kind:
            pauses = [item.pause_ms for item in client.log(trajectory) if item.tool.name == "step"]
            row[kind] = {
                "step_ms": statistics.median(json.loads(output)),
                "bytes": (stored - before) / times,
                "pause_ms": statistics.median(pauses),
            }
        before = stored
    return row


@contextlib.contextmanager
def daemon(work: Path) -> Iterator[Snapshotd]:
    state = work / "state"
    client = Snapshotd(state_dir=state)
    try:
        client.build_image("default", progress=lambda line: print(line, file=sys.stderr))
        yield client
    finally:
        subprocess.run([sys.executable, "-m", "snapshotd", "--state-dir", str(state), "daemon", "--stop"], check=False)


def missing(method: str) -> str | None:
    if shutil.which(NEEDS[method]) is None:
        return f"missing: {NEEDS[method]}"
    if method == "docker commit" and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "missing: no Docker engine answers"
    return None


def size(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    kinds = list(KINDS)
    lines = [
        f"{machine['cpus']} processors, Linux {machine['kernel']}, {report['rounds']} steps of each kind, medians, "
        f"load {machine['load']:.1f} at the start",
        "",
        "| | " + " | ".join(f"{kind} changed: step | bytes" for kind in kinds) + " |",
        "|---|" + "---:|---:|" * len(kinds),
    ]
    for method, row in report["methods"].items():
        if isinstance(row, str):
            lines.append(f"| {method} | {row} |" + " |" * (2 * len(kinds) - 1))
        else:
            cells = [f"{row[kind]['step_ms']:.1f} ms | {size(row[kind]['bytes'])}" for kind in kinds]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    pauses = [f"{report['methods']['snapshotd'][kind]['pause_ms']:.1f} ms ({kind})" for kind in kinds]
    return "\n".join([*lines, "", "snapshotd's sandbox stands still for " + ", ".join(pauses) + " of its step."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="runc")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--dir", type=Path, help="where to work; default: a temporary directory")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    methods: dict[str, Row | str] = {}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="snapshotd-bench-") as directory:
        work = Path(directory)
        original = work / "workspace"
        original.mkdir()
        make(original)

        def measured(method: str, measure: Callable[..., Row], *more: Any) -> None:
            why = missing(method)
            folder = work / method.replace(" ", "-")
            copy = folder / "workspace"
            if why is None:
                folder.mkdir()
                run("cp", "-a", original, copy)
                run("sync")
            methods[method] = why or measure(folder, copy, options.rounds, *more)

        with daemon(work) as client:
            run("sync")
            methods["snapshotd"] = snapshotd(client, original, options.rounds, options.runtime)
            client.export_file(client.create(runtime=options.runtime)[1].id, work / "root.tar", form="tar")
        measured("shadow git", shadow_git)
        measured("restic", restic)
        measured("btrfs snapshot", btrfs)
        measured("docker commit", docker, work / "root.tar")
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "load": load}
    report = {"machine": machine, "rounds": options.rounds, "methods": methods}
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


main()
