"""What a sandbox costs, by its maker: the starter, runc or crun, on either version of cgroups.

    python benchmarks/makers.py [--rounds 15] [--guest 6.12] [--json FILE]

Three daemons with one maker each; every round makes a sandbox with each of them, in turns, and forks one. The commands
are the starter's in all three. On this machine, or with `--guest` on a kernel of Debian's with cgroups of version 2, in
QEMU's software emulation, where everything takes some forty times as long: compare within a table. crun is left out
where it does not run (1.8 does not on the hybrid of both versions).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from snapshotd.client import Snapshotd, SnapshotdError
from snapshotd.kernel.processes import descendants, stat_fields

MAKERS = ("starter", "runc", "crun")
_START_S = 300
_MARK = "FIGURES "
_DAEMON = """
import sys
from snapshotd.cli.main import main
from snapshotd.runtime import runc
if sys.argv[1] != "starter":
    runc.learn = lambda *_: None  # without a pattern, the runtime makes every sandbox
raise SystemExit(main(["--state-dir", sys.argv[2], "daemon", "--foreground"]))
"""


@contextlib.contextmanager
def daemon(maker: str, state: Path, image: Path) -> Iterator[Snapshotd]:
    """A daemon whose sandboxes all have this maker."""
    state.mkdir()
    environment = {**os.environ, "SNAPSHOTD_WARM": "0"}
    if maker == "crun":
        crun = shutil.which("crun")
        if crun is None:
            raise RuntimeError("it is not installed")
        (state / "bin").mkdir()
        (state / "bin" / "runc").symlink_to(crun)
        environment["PATH"] = f"{state / 'bin'}:{environment['PATH']}"
    with open(state / "said", "wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", _DAEMON, maker, state], env=environment, stdout=said, stderr=said
        )
    try:
        client, deadline = Snapshotd(state_dir=state), time.monotonic() + _START_S
        while not (state / "snapshotd.sock").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((state / "said").read_text()[-3000:])
            time.sleep(0.1)
        client.import_image(str(image), name="default")
        yield client
    finally:
        process.terminate()
        process.wait()


def processor_s(pid: int) -> float:
    """Seconds that a daemon, its live descendants and the ended ones have used."""
    ticks = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ticks += sum(map(int, stat_fields(each)[11 : 15 if each == pid else 13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(image: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of each round, by maker and kind."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="snapshotd-makers-", dir="/var/tmp")))
        clients, snapshots, used = {}, {}, {}
        for maker in MAKERS:
            try:
                client = stack.enter_context(daemon(maker, scratch / maker, image))
                parent, snapshot = client.create()
                client.exec(parent.id, ["true"])
            except (SnapshotdError, RuntimeError) as exc:
                print(f"{maker} is left out: {exc}", file=sys.stderr)
                continue
            clients[maker], snapshots[maker] = client, snapshot.id
            found[maker] = {"create": [], "fork": []}
        for number in range(rounds + 1):
            for maker, client in clients.items():
                row = found[maker]
                if number == 1:
                    row["create"].clear()
                    row["fork"].clear()
                    used[maker] = processor_s(client.version().pid)
                row["create"].append(_timed(client, lambda c=client: c.create()[0].id))
                row["fork"].append(_timed(client, lambda c=client, m=maker: c.fork(snapshots[m], 1).trajectories[0].id))
        for maker, client in clients.items():
            found[maker]["processor"] = (processor_s(client.version().pid) - used[maker]) / rounds / 2 * 1e3
    return found


def _timed(client: Snapshotd, make: Callable[[], str]) -> float:
    """Until the output of the first command is here."""
    began = time.perf_counter()
    trajectory = make()
    client.exec(trajectory, ["true"])
    took = (time.perf_counter() - began) * 1e3
    client.remove(trajectory, force=True)
    return took


def report(found: dict[str, Any], rounds: int, kernel: str, version: int) -> str:
    lines = [
        f"{rounds} rounds, Linux {kernel}, cgroups of version {version}, milliseconds",
        "",
        "| made by | create to first command: p50 | least | ratio | fork to first command: p50 | least | ratio | processor |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for maker, row in found.items():
        cells = []
        for kind in ("create", "fork"):
            pairs = [one / other for one, other in zip(row[kind], found["starter"][kind], strict=True)]
            cells += [f"{statistics.median(row[kind]):.0f}", f"{min(row[kind]):.0f}", f"{statistics.median(pairs):.1f}"]
        lines.append(f"| {maker} | {' | '.join(cells)} | {row['processor']:.0f} |")
    return "\n".join(lines)


def in_guest(kernel: str, image: Path, rounds: int) -> dict[str, Any]:
    from tests import guest

    with tempfile.TemporaryDirectory(prefix="snapshotd-makers-") as folder:
        crun = _debian("crun", Path(folder)) | _debian("libyajl2", Path(folder))
        files = {"/root/makers.py": Path(__file__), "/root/image.tar": image, **crun}
        script = f"ldconfig; python3 /root/makers.py --here /root/image.tar --rounds {rounds}"
        ended = guest.run(kernel, script, timeout_s=3000, files=files)
    found = re.search(rf"{_MARK}(.*)", ended.said)
    if ended.status != 0 or found is None:
        sys.exit(ended.said[-5000:])
    print("\n".join(line for line in ended.said.splitlines() if "left out" in line), file=sys.stderr)
    answer: dict[str, Any] = json.loads(found[1])
    return answer


def _debian(package: str, folder: Path) -> dict[str, Path]:
    """The programs and libraries of one of Debian's packages."""
    place = folder / package
    place.mkdir()
    subprocess.run(["apt-get", "download", "-q", package], cwd=place, check=True, capture_output=True)
    (archive,) = place.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, place / "x"], check=True)
    return {
        f"/{path.relative_to(place / 'x')}": path
        for path in (place / "x" / "usr").rglob("*")
        if path.parent.name == "bin" or ".so" in path.name
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--guest", metavar="KERNEL", help="6.1 or 6.12")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        found = {"makers": measure(options.here, options.rounds), "kernel": platform.release()}
        print(_MARK + json.dumps(found), flush=True)
        return
    from tests import root_tree

    with tempfile.TemporaryDirectory(prefix="snapshotd-makers-", dir="/var/tmp") as folder:
        root_tree.build(Path(folder) / "root")
        image = Path(folder) / "image.tar"
        with tarfile.open(image, "w") as archive:
            archive.add(Path(folder) / "root", ".")
        if options.guest:
            found, version = in_guest(options.guest, image, options.rounds), 2
        else:
            found = {"makers": measure(image, options.rounds), "kernel": platform.release()}
            version = 1 if Path("/sys/fs/cgroup/freezer").exists() else 2
    print(report(found["makers"], options.rounds, found["kernel"], version))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
