"""The page, in Debian's Chromium, over a real daemon: how soon it shows, how it scrolls, what it holds, and what watching
costs the agent. As root (playwright from PyPI; Debian's chromium):

    python benchmarks/page.py [--calls 10000] [--rounds 15] [--pairs 12] [--only PART] [--by WATCHERS] [--json FILE]

One agent makes so many calls through the engine, each a snapshot; each tenth changes a file. Another trajectory has one
call with 50 MiB of output.

    first rows       from the beginning of the navigation until the first rows have been painted, in a tab of its own
    scrolling        frames a second while the ledger is scrolled from its end to its begin, each frame by SCROLL_PX
    memory           of the tab's process: proportional (PSS), and the script's heap, after the scrolling
    large output     from the click until its first lines are painted; memory after that
    commit to row    from the time in the snapshot, taken at its commit, until its row has been painted
    watching         the agent's wait at the end of a call, without a page, with one, with 20, and with 20 readers of the
                     stream of events that are no browsers: in pairs, each as a ratio to the run without beside it
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Error, Page, sync_playwright

from snapshotd.client import Snapshotd

HERE = Path(__file__).parent
MIB = 1 << 20
SCROLL_PX = 240
PAGES = 20
STEPS = 60
PAINTED = """(wanted => new Promise(done => {
    const look = () => document.querySelector(wanted)
        ? requestAnimationFrame(() => setTimeout(() => done(performance.now()))) : requestAnimationFrame(look);
    look();
}))"""
"""Milliseconds since the navigation began, once something is there and a frame has been drawn with it."""
SCROLL = """(pixels => new Promise(done => {
    const box = document.querySelector('.calls'), began = performance.now(), frames = [], empty = [];
    const step = now => {
        frames.push(now);
        empty.push([...box.querySelectorAll('.row')].filter(one => !one.firstElementChild).length);
        box.scrollTop -= pixels;
        box.scrollTop > 0 ? requestAnimationFrame(step) : done({frames, empty, ms: performance.now() - began});
    };
    requestAnimationFrame(step);
}))"""
SEEN = """(() => {
    window.seen = {};
    const look = () => {
        for (const one of document.querySelectorAll('.row .number')) window.seen[one.textContent] ??= Date.now();
        requestAnimationFrame(look);
    };
    look();
})()"""
"""Notes the time at which each row was first there when a frame was drawn."""


def middle(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


def make(client: Snapshotd, calls: int) -> float:
    """The trajectories `long` and `large`. Milliseconds of a call of `long`."""
    made = client.run(agent=HERE / "page_agent.py", args=[str(calls), "0"], name="long", image="minimal")
    waited = times(client, made.id)
    large = client.create(name="large", image="minimal")[0]
    client.exec(
        large.id, ["sh", "-c", "seq -f 'line %.0f of an output that is far too long to look at' 1000000 | head -c 50M"]
    )
    return statistics.median(waited)


def times(client: Snapshotd, trajectory: str) -> list[float]:
    """The agent's waits; returns when it has ended."""
    output = b""
    for event in client.events(trajectory):
        if event["event"] == "output":
            output += base64.b64decode(event["data_b64"])
    waited: list[float] = json.loads(output.decode().strip().splitlines()[-1])["client_ms"]
    return waited[5:]


@contextlib.contextmanager
def served(client: Snapshotd) -> Iterator[str]:
    """The address of a page's server."""
    server = subprocess.Popen(
        [sys.executable, "-m", "snapshotd", "ui", "--print"],
        env={**os.environ, "SNAPSHOTD_SOCKET": str(client.socket_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait()


def memory(page: Page) -> dict[str, float]:
    """MiB of a tab: of its process, and of its heap after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    session.send("HeapProfiler.collectGarbage")
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    title = f"measured {id(page)}"
    page.evaluate("title => { document.title = title }", title)
    browser = page.context.browser
    assert browser is not None
    processes = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    sizes = [_pss(one["id"]) for one in processes if one["type"] == "renderer"]
    return {"heap": metrics["JSHeapUsedSize"] / MIB, "process": max(sizes), "elements": metrics["Nodes"]}


def _pss(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def looking(context: BrowserContext, origin: str, rounds: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in ("list", "ledger"):
        wanted, place = (".trajectory b", "#/") if name == "list" else (".row b", "#/t/long")
        shown = []
        for _ in range(rounds):
            page = context.new_page()
            page.goto(f"{origin}/{place}", wait_until="commit")
            shown.append(page.evaluate(f"{PAINTED}('{wanted}')"))
            page.close()
        report[f"first rows, {name}"] = middle(shown)
    page = context.new_page()
    page.goto(f"{origin}/#/t/long")
    page.locator(".row b").first.wait_for()
    report["memory, opened"] = memory(page)
    scrolled = page.evaluate(f"{SCROLL}({SCROLL_PX})")
    gaps = [b - a for a, b in zip(scrolled["frames"], scrolled["frames"][1:], strict=False)]
    report["scrolling"] = {
        "frames a second": len(gaps) / (scrolled["ms"] / 1e3),
        "rows a second": len(gaps) * SCROLL_PX / 42 / (scrolled["ms"] / 1e3),
        "frame_ms": middle(gaps),
        "frames with an empty row": sum(1 for one in scrolled["empty"] if one) / len(scrolled["empty"]),
    }
    report["memory, scrolled"] = memory(page)
    page.close()
    page = context.new_page()
    page.goto(f"{origin}/#/t/large")
    row = page.locator(".row", has_text="exec").last
    row.wait_for()
    began = page.evaluate("performance.now()")
    row.click()
    page.get_by_role("tab", name="output").click()
    report["large output"] = {"ms": page.evaluate(f"{PAINTED}('.lines .slot div')") - began, **memory(page)}
    page.close()
    return report


def latency(client: Snapshotd, context: BrowserContext, origin: str) -> dict[str, float]:
    page = context.new_page()
    page.goto(f"{origin}/#/t/live")
    page.locator("nav").wait_for()
    made = client.run(agent=HERE / "page_agent.py", args=["100", "0.1"], name="live", image="minimal")
    page.evaluate(SEEN)
    times(client, made.id)
    page.wait_for_timeout(1000)
    seen = page.evaluate("window.seen")
    page.close()
    late = [
        seen[str(one.seq)] - datetime.fromisoformat(one.created_at).timestamp() * 1e3
        for one in client.log(made.id)
        if one.tool.name in ("look", "write") and one.seq > 10
    ]
    client.remove(made.id, force=True)
    return middle(late)


def step_ms(client: Snapshotd) -> float:
    made = client.run(agent=HERE / "page_agent.py", args=[str(STEPS), "0.02"], image="minimal")
    waited = statistics.median(times(client, made.id))
    client.remove(made.id, force=True)
    return waited


def _open(page: Page, address: str) -> None:
    """A container that starts or ends gives the machine another network, and the browser breaks off what it loads."""
    while True:
        try:
            page.goto(address)
            return
        except Error as exc:
            if "ERR_NETWORK_CHANGED" not in exc.message:
                raise


@contextlib.contextmanager
def pages(context: BrowserContext, origin: str, count: int) -> Iterator[None]:
    opened = [context.new_page() for _ in range(count)]
    for page in opened:
        _open(page, f"{origin}/#/t/long")
        page.locator(".row b").first.wait_for()
    yield
    for page in opened:
        page.close()


@contextlib.contextmanager
def readers(client: Snapshotd, count: int) -> Iterator[None]:
    """So many programs that read the stream of events, in one process that looks at nothing of it."""
    code = (
        "import socket, sys, threading\n"
        "def read():\n"
        "    link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])\n"
        "    link.sendall(b'GET /v1/watch HTTP/1.1\\r\\nHost: daemon\\r\\n\\r\\n'); link.recv(1)\n"
        "    ready.release()\n"
        "    while link.recv(1 << 16): pass\n"
        "ready = threading.Semaphore(0)\n"
        f"[threading.Thread(target=read, daemon=True).start() for _ in range({count})]\n"
        f"[ready.acquire() for _ in range({count})]\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(client.socket_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    yield
    process.stdin.close()
    process.wait()


WATCHERS = ("1 page", f"{PAGES} readers", f"{PAGES} pages")


def watching(
    client: Snapshotd, context: BrowserContext, origin: str, pairs: int, by: tuple[str, ...]
) -> dict[str, Any]:
    every = (lambda: pages(context, origin, 1), lambda: readers(client, PAGES), lambda: pages(context, origin, PAGES))
    kinds = {name: opened for name, opened in zip(WATCHERS, every, strict=True) if name in by}
    report: dict[str, Any] = {}
    for name, opened in kinds.items():
        with_ms, without_ms = [], []
        for number in range(2 * pairs):
            if number % 4 in (0, 3):  # each order as often as the other: a machine that grows slower favours neither
                with opened():
                    with_ms.append(step_ms(client))
            else:
                without_ms.append(step_ms(client))
        ratios = sorted(a / b for a, b in zip(with_ms, without_ms, strict=True))
        edge = _rank(pairs)
        report[name] = {
            "with_ms": statistics.median(with_ms),
            "without_ms": statistics.median(without_ms),
            "ratio": statistics.median(ratios),
            "from": ratios[edge],
            "to": ratios[-1 - edge],
        }
    return report


def _rank(pairs: int) -> int:
    """The rank, from either end, between which the true median lies in 95 of 100 runs; 0 for fewer than 9 pairs."""
    rank, tail = 0, 0.5**pairs
    while tail + math.comb(pairs, rank + 1) * 0.5**pairs <= 0.025:
        rank += 1
        tail += math.comb(pairs, rank) * 0.5**pairs
    return rank


def table(watching: dict[str, Any], pairs: int) -> str:
    """What watching costs, for `make bench`."""
    lines = [
        f"{pairs} pairs of runs:",
        "",
        "| watched by | wait, watched | wait, alone | ratio | 95 % |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in watching.items():
        lines.append(
            f"| {name} | {one['with_ms']:.2f} ms | {one['without_ms']:.2f} ms | {one['ratio']:.2f} | {one['from']:.2f} to {one['to']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", choices=["looking", "latency", "watching"], action="append")
    parser.add_argument("--by", choices=WATCHERS, action="append", help="for `watching`")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    parts = options.only or ["looking", "latency", "watching"]
    state = Path(tempfile.mkdtemp(prefix="snapshotd-bench-"))
    client = Snapshotd(state_dir=state)
    report: dict[str, Any] = {"load at the start": os.getloadavg()[0], "calls": options.calls}
    try:
        report["a call_ms"] = make(client, options.calls)
        print(json.dumps(report), file=sys.stderr, flush=True)
        with served(client) as address, sync_playwright() as started:
            browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            context = browser.new_context(viewport={"width": 1400, "height": 820})
            context.new_page().goto(address)
            context.pages[0].locator("nav").wait_for()
            origin = address.partition("/#")[0]
            report["memory, empty tab"] = memory(context.pages[0])
            for part in parts:
                report[part] = {
                    "looking": lambda: looking(context, origin, options.rounds),
                    "latency": lambda: latency(client, context, origin),
                    "watching": lambda: watching(client, context, origin, options.pairs, tuple(options.by or WATCHERS)),
                }[part]()
                print(json.dumps({part: report[part]}, indent=1), file=sys.stderr, flush=True)
            browser.close()
        report["load at the end"] = os.getloadavg()[0]
        print(table(report["watching"], options.pairs) if parts == ["watching"] else json.dumps(report, indent=2))
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    finally:
        subprocess.run([sys.executable, "-m", "snapshotd", "--state-dir", str(state), "daemon", "--stop"], check=False)
        shutil.rmtree(state, ignore_errors=True)


main()
