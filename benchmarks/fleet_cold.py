"""Forks on nodes of a fleet that have nothing of the snapshot yet, with the bucket some way off. As root, with runc and FUSE:

    python -m benchmarks.fleet_cold [--files 3000] [--delay-ms 30] [--forks 5] [--json FILE]

Daemons share a bucket (moto) and a PostgreSQL server (Debian's). Between each of them and the bucket stands a proxy that holds
every answer back for `--delay-ms` and counts the bytes. A node's first forks of a snapshot begin through FUSE: the command
of each reads 300 of the files and a part of a large one. After each fork its layer is given up, so the next is cold again.

    bucket alone       SNAPSHOTD_NODE_CACHE=0
    cache              the node's disk keeps what was read; it is the first one that reads this tree
    cache and order    another node, which fetches ahead what the one before has read
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.fleet_forks import services
from snapshotd.client import Snapshotd
from snapshotd.store.open import open_store

MIB = 1 << 20
FILL = """
import os, random, sys
rng = random.Random(1)
for number in range(int(sys.argv[1])):
    os.makedirs(f"d{number % 100}", exist_ok=True)
    with open(f"d{number % 100}/f{number}", "wb") as file:
        file.write(rng.randbytes(rng.randrange(2000, 14000)))
with open("large", "wb") as file:
    for _ in range(64):
        file.write(rng.randbytes(1 << 20))
"""
COMMAND = "cat d7/* d17/* d27/* d37/* d47/* d57/* d67/* d77/* d87/* d97/* | wc -c; tail -c 1000000 large | wc -c"
_DEADLINE_S = 120


class Proxy:
    """A way to the bucket on which every answer takes longer; counts its bytes and answers."""

    def __init__(self, host: str, port: int, delay_s: float) -> None:
        self._to, self._delay_s = (host, port), delay_s
        self.received = self.answers = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.port: int = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection(*self._to)
        asked = asyncio.Event()

        async def there() -> None:
            while data := await reader.read(1 << 16):
                asked.set()
                downstream.write(data)
                await downstream.drain()
            downstream.close()

        async def back() -> None:
            while data := await upstream.read(1 << 18):
                if asked.is_set():
                    asked.clear()
                    self.answers += 1
                    await asyncio.sleep(self._delay_s)
                self.received += len(data)
                writer.write(data)
                await writer.drain()
            writer.close()

        with contextlib.suppress(OSError):
            await asyncio.gather(there(), back())


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            sys.exit(f"the daemon did not get there in time: {what}")
        time.sleep(0.02)


@contextlib.contextmanager
def node(
    name: str, folder: Path, shared: dict[str, str], delay_s: float, **settings: str
) -> Iterator[tuple[Snapshotd, Proxy]]:
    address, _, endpoint = shared["SNAPSHOTD_STORE"].partition("?endpoint=")
    there = urlsplit(endpoint)
    proxy = Proxy(str(there.hostname), int(there.port or 80), delay_s)
    state = folder / name
    (state / "repo").mkdir(parents=True)
    shutil.copy(folder / "key", state / "repo" / "key")
    own = {"SNAPSHOTD_NODE": name, "SNAPSHOTD_STORE": f"{address}?endpoint=http://127.0.0.1:{proxy.port}"}
    command = [sys.executable, "-m", "snapshotd", "--state-dir", str(state), "daemon"]
    daemon = subprocess.Popen(
        [*command, "--foreground"], env={**os.environ, **shared, **own, **settings}, stderr=subprocess.DEVNULL
    )
    try:
        client = Snapshotd(state_dir=state, autostart=False)

        def answers() -> bool:
            with contextlib.suppress(Exception):
                return bool(client.status())
            return False

        until(answers, "it starts")
        yield client, proxy
    finally:
        subprocess.run([*command, "--stop"], check=False, capture_output=True)
        daemon.wait(_DEADLINE_S)


def measure(client: Snapshotd, proxy: Proxy, snapshot: str, forks: int) -> list[dict[str, float]]:
    found = []
    for _ in range(forks):
        until(lambda: _quiet(proxy), "nothing is pulled")
        client.prune()
        until(lambda: client.usage().layer_bytes < MIB, "the layer is given up")
        before, answers, began = proxy.received, proxy.answers, time.perf_counter()
        (fork,) = client.fork(snapshot, 1).trajectories
        forked = time.perf_counter()
        client.exec(fork.id, ["sh", "-c", COMMAND])
        row = {"fork_ms": (forked - began) * 1e3, "command_ms": (time.perf_counter() - began) * 1e3}
        row |= {"mib": (proxy.received - before) / MIB, "requests": proxy.answers - answers}
        until(lambda: _quiet(proxy), "nothing is pulled")
        row["mib_in_the_end"] = (proxy.received - before) / MIB
        client.remove(fork.id, force=True)
        found.append(row)
    return found


def _quiet(proxy: Proxy) -> bool:
    before = proxy.received
    time.sleep(2)
    return proxy.received - before < MIB // 8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--delay-ms", type=float, default=30)
    parser.add_argument("--forks", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder, delay_s = Path(tempfile.mkdtemp(prefix="fleet-cold-")), given.delay_ms / 1e3
    results: dict[str, list[dict[str, float]]] = {}
    try:
        with contextlib.ExitStack() as opened:
            shared = opened.enter_context(services(folder, "127.0.0.1"))
            home, _ = opened.enter_context(node("home", folder, shared, delay_s))
            task, _ = home.create(image="minimal")
            last = home.exec(task.id, ["python3", "-c", FILL, str(given.files)]).snapshot
            assert last is not None
            home.flush(task.id, published=True)
            bucket = opened.enter_context(contextlib.closing(open_store(shared["SNAPSHOTD_STORE"])))
            for name, title, cache in (
                ("plain", "bucket alone", {"SNAPSHOTD_NODE_CACHE": "0"}),
                ("first", "cache", {}),
                ("second", "cache and order", {}),
            ):
                with node(name, folder, shared, delay_s, SNAPSHOTD_LAYER_BUDGET="0", **cache) as (client, proxy):
                    began = time.perf_counter()
                    client.log(task.id)  # the history and the image are brought
                    image = {"image_ms": (time.perf_counter() - began) * 1e3, "image_mib": proxy.received / MIB}
                    other, _ = client.create(image="minimal")  # a container is warm
                    client.remove(other.id, force=True)
                    results[title] = measure(client, proxy, last.id, given.forks)
                    results[title][0] |= image
                    if name == "first":
                        until(lambda: list(bucket.keys("reads/")), "the order is written")
                print(title, json.dumps(results[title]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report(results))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 0


def report(results: dict[str, list[dict[str, float]]]) -> str:
    rows = [
        "| | first fork | requests | MiB until then | in the end | later forks | requests | MiB until then | in the end |"
    ]
    rows.append(f"|---|{'---:|' * 8}")
    for title, found in results.items():
        cells = [title]
        for some in ([found[0]], found[1:]):
            for name, form in (
                ("command_ms", "{:.0f} ms"),
                ("requests", "{:.0f}"),
                ("mib", "{:.1f}"),
                ("mib_in_the_end", "{:.1f}"),
            ):
                cells.append(form.format(statistics.median(one[name] for one in some)))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
