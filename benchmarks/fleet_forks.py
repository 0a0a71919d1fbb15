"""One program over several nodes: forks that run a command and are scored, and the bytes that a node pulls for one. As root:

    python -m benchmarks.fleet_forks [--nodes 4] [--forks 1000] [--wave 64] [--files 200] [--database] [--json FILE]

Each node is a daemon in a network namespace of its own, on a bridge of this machine, with TLS and a token. Its sandboxes are
plain folders (tests/small_daemon.py), so what is measured is the fleet and not the isolation. Waves of `--wave` forks of
one snapshot are made, each fork runs a command whose output is its score, and is removed. The same forks on one node alone are
measured in the same run, before and after, and their mean is what the nodes are compared with.

With `--database` the nodes are a fleet: they share a bucket (moto) and a PostgreSQL server (Debian's), room is reserved, and a node
gets the snapshot from the bucket. Else the driver carries it to the nodes that it was given.

All nodes share the processors of this machine, so the ratio says what the fleet costs, and not what more machines give.
Bytes are those that came to a node's network interface: while forks were made (the snapshot), and while they worked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from snapshotd.client import Branch, Fleet, Sandbox, Snapshotd
from snapshotd.client.remote.logins import Login, save_login
from snapshotd.repo.key import load_key

SMALL_DAEMON = Path(__file__).parents[1] / "tests" / "small_daemon.py"
MEMORY = 1 << 20
_START_S = 60
COMMAND = "cat d*/* | wc -c; echo $((RANDOM % 100))"


@dataclass
class Node:
    """A daemon in a network namespace."""

    name: str
    process: subprocess.Popen[bytes]
    client: Snapshotd
    address: str
    token: str
    pin: str

    def received(self) -> int:
        """Bytes that came to its interface."""
        text = run("ip", "netns", "exec", self.name, "cat", "/sys/class/net/eth0/statistics/rx_bytes")
        return int(text)


@dataclass
class Measured:
    nodes: int
    forks: int = 0
    seconds: float = 0.0
    fork_ms: list[float] = field(default_factory=list)
    """Of one fork in a wave, as it waits: a wave's time by its forks."""
    pulled_bytes: int = 0
    """By the nodes other than the snapshot's home, as forks were made."""
    working_bytes: int = 0
    away: int = 0
    """Forks on those nodes."""

    @property
    def rate(self) -> float:
        return self.forks / self.seconds


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@contextlib.contextmanager
def bridge() -> Iterator[str]:
    name = f"sf{os.getpid() % 100000}"
    run("ip", "link", "add", name, "type", "bridge")
    try:
        run("ip", "addr", "add", "10.213.0.1/24", "dev", name)
        run("ip", "link", "set", name, "up")
        yield name
    finally:
        run("ip", "link", "delete", name)


@contextlib.contextmanager
def node(bridge_name: str, number: int, folder: Path, shared: dict[str, str]) -> Iterator[Node]:
    """`shared`: the environment that makes it one of a fleet; empty: it is alone."""
    name, host = f"{bridge_name}n{number}", f"10.213.0.{number + 10}"
    place = folder / str(number)
    (place / "state" / "repo").mkdir(parents=True)
    environment = {**os.environ, "SMALL_LISTEN": f"{host}:7676"}
    if shared:
        shutil.copy(folder / "key", place / "state" / "repo" / "key")
        own = {"SNAPSHOTD_NODE": f"node-{number}", "SNAPSHOTD_NODE_ADDRESS": f"https://{host}:7676"}
        environment |= {**shared, **own}
    run("ip", "netns", "add", name)
    try:
        outside = f"{bridge_name}v{number}"
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", outside, "master", bridge_name, "up")
        for words in (
            ("addr", "add", f"{host}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            run("ip", "-n", name, *words)
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            str(SMALL_DAEMON),
            str(place / "state"),
            str(place / "s.sock"),
        ]
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            client = Snapshotd(place / "state", place / "s.sock", autostart=False)
            told = _status(client, process, place / "log")
            token = client.create_token("driver", scopes=["admin"]).token
            yield Node(name, process, client, told["listening"], token, told["fingerprint"])
        finally:
            process.terminate()
            process.wait(_START_S)
    finally:
        run("ip", "netns", "delete", name)


@contextlib.contextmanager
def services(folder: Path, host: str = "10.213.0.1") -> Iterator[dict[str, str]]:
    """A bucket and a database: the environment of a node that shares them."""
    from tests.postgres_server import PostgresServer  # with the developers' extras
    from tests.s3_service import make_bucket, running

    load_key(folder)
    with running(host) as endpoint, contextlib.closing(PostgresServer()) as server:
        server.ask("CREATE DATABASE fleet")
        store = f"s3://{make_bucket(endpoint)}?endpoint={endpoint}"
        yield {"SNAPSHOTD_FLEET": server.url_of("fleet"), "SNAPSHOTD_STORE": store}


def _status(client: Snapshotd, process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(Exception):
            return client.status()
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a node did not start: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def score(branch: Branch) -> int:
    done = branch.exec(["bash", "-c", COMMAND], check=True)
    return int(done.stdout.split()[-1])


def measure(fleet: Fleet, nodes: list[Node], task: Sandbox, forks: int, wave: int) -> Measured:
    """Forks of a snapshot, in waves that the nodes share evenly."""
    found = Measured(len(nodes))
    snapshot, per_node = task.head().id, -(-wave // len(nodes))
    while found.forks < forks:
        count = min(wave, forks - found.forks)
        before = sum(each.received() for each in nodes[1:])
        began = time.monotonic()
        branches = fleet.fork(snapshot, count, memory=MEMORY, per_node=per_node)
        made = time.monotonic()
        between = sum(each.received() for each in nodes[1:])
        scores = fleet.map(score, branches)
        fleet.map(lambda branch: branch.remove(force=True), branches)
        found.seconds += time.monotonic() - began
        assert all(isinstance(each, int) for each in scores), scores
        found.fork_ms.append((made - began) * 1000 / count)
        found.forks += count
        found.away += sum(branch.node != branches[0].node for branch in branches)
        found.pulled_bytes += between - before
        found.working_bytes += sum(each.received() for each in nodes[1:]) - between
        fleet.forget(branches)
    return found


def prepared(first: Node, files: int) -> Sandbox:
    """A task on the first node: so many files of 4 kB that nothing compresses."""
    task = Sandbox.create(client=first.client)
    task.files.write_many({f"d{number % 20}/f{number}": os.urandom(4096) for number in range(files)})
    return task


def report(alone: list[Measured], shared: Measured, files: int) -> str:
    rate = statistics.mean(each.rate for each in alone)
    away = max(1, shared.away)
    rows = [
        ("nodes", "1", str(shared.nodes)),
        ("forks, each with a command and a score", str(sum(each.forks for each in alone)), str(shared.forks)),
        ("a second", f"{rate:.1f}", f"{shared.rate:.1f} ({shared.rate / rate:.2f} times)"),
        (
            "a fork, ms",
            f"{statistics.median(ms for each in alone for ms in each.fork_ms):.1f}",
            f"{statistics.median(shared.fork_ms):.1f}",
        ),
        ("forks on another node than the snapshot's home", "0", str(shared.away)),
        (f"bytes pulled for one of those ({files} files, {files * 4} kB)", "", f"{shared.pulled_bytes / away:,.0f}"),
        ("bytes that its work brings to its node", "", f"{shared.working_bytes / away:,.0f}"),
    ]
    return "\n".join(["| | one node | the fleet |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--forks", type=int, default=1000)
    parser.add_argument("--wave", type=int, default=64)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--database", action="store_true", help="a fleet over a bucket and PostgreSQL")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fleet-forks-"))
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    try:
        with contextlib.ExitStack() as opened:
            name = opened.enter_context(bridge())
            shared = opened.enter_context(services(folder)) if given.database else {}
            nodes = [opened.enter_context(node(name, number, folder, shared)) for number in range(given.nodes)]
            for each in nodes:
                save_login(each.address, Login(each.token, each.pin))
            one = opened.enter_context(Fleet.open([nodes[0].address]))
            all_ = opened.enter_context(
                Fleet.open(shared["SNAPSHOTD_FLEET"] if shared else [each.address for each in nodes])
            )
            task = prepared(nodes[0], given.files)
            part = max(1, given.forks // 5)
            before = measure(one, nodes[:1], task, part, given.wave)
            together = measure(all_, nodes, task, given.forks, given.wave)
            after = measure(one, nodes[:1], task, part, given.wave)
            print(report([before, after], together, given.files))
            if given.json:
                given.json.write_text(json.dumps([asdict(each) for each in (before, together, after)], indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
