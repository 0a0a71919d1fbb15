"""What a checkpoint of a LangGraph conversation costs, and how many bytes it leaves. `make bench-savers`, or:

    python benchmarks/savers.py [--checkpoints 10,1000] [--threads 1,16] [--only snapshotd,sqlite] [--json FILE]

Each saver stores the same growing conversation: a checkpoint for each message, with the write that made it. PostgreSQL
is started here when Debian's package and langgraph-checkpoint-postgres are installed. All are as durable as they come:
a commit is on the disk when it returns. Figures of one run on one machine: compare within a run, and give ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.sqlite import SqliteSaver

from snapshotd.integrations.langgraph import SnapshotdSaver

WORDS = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split()
LOOKS, LISTED = 20, 20


def conversation(count: int, seed: int) -> list[AnyMessage]:
    """Questions of 20 words and answers of 80, from the text of a page."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    made: list[AnyMessage] = []
    for number in range(count):
        name = str(uuid.UUID(int=draw.getrandbits(128)))
        usage = {"prompt_tokens": draw.randrange(9999), "completion_tokens": draw.randrange(999)}
        made.append(
            AIMessage(text(80), id=f"run--{name}", response_metadata={"model_name": "m", "token_usage": usage})
            if number % 2
            else HumanMessage(text(20), id=name)
        )
    return made


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = work()
    times.append(time.perf_counter() - began)
    return result


def talk(saver: Any, thread: str, said: list[AnyMessage], times: dict[str, list[float]]) -> None:
    """Store the conversation, and read it."""
    here: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    at, version = here, None
    for number, message in enumerate(said):
        if number:
            writes = [("messages", [message]), ("branch:to:model", None)]
            task, parent = str(uuid.uuid4()), at
            timed(times["put_writes"], lambda: saver.put_writes(parent, writes, task, "~__pregel_pull, model"))  # noqa: B023
        version = saver.get_next_version(version, None)
        versions = dict.fromkeys(("__start__", "messages", "branch:to:model"), version)
        checkpoint: Any = {
            "v": 4,
            "id": str(uuid6()),
            "ts": "2026-11-25T07:00:00.000000+00:00",
            "channel_values": {"messages": said[: number + 1], "branch:to:model": None},
            "channel_versions": versions,
            "versions_seen": {"__input__": {}, "__start__": {"__start__": version}, "model": versions},
            "updated_channels": ["messages"],
        }
        metadata: Any = {"source": "loop", "step": number, "parents": {}}
        parent = at
        at = timed(times["put"], lambda: saver.put(parent, checkpoint, metadata, versions))  # noqa: B023
    for _ in range(LOOKS):
        timed(times["get_tuple"], lambda: saver.get_tuple(here))
    for _ in range(3):
        timed(times[f"list {LISTED}"], lambda: list(saver.list(here, limit=LISTED)))


@contextlib.contextmanager
def ours(folder: Path) -> Iterator[Any]:
    with SnapshotdSaver(folder / "a.db") as saver:
        yield saver


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[Any]:
    with contextlib.closing(sqlite3.connect(folder / "a.db", check_same_thread=False)) as connection:
        yield SqliteSaver(connection)


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[Any]:
    """A server of its own, over a socket, with Debian's settings."""
    from langgraph.checkpoint.postgres import PostgresSaver

    programs = max(Path("/usr/lib/postgresql").glob("*/bin"))
    folder.chmod(0o755)
    data = folder / "data"
    data.mkdir()
    shutil.chown(data, "postgres")

    def run(*words: str | Path) -> None:
        subprocess.run(
            ["runuser", "-u", "postgres", "--", *map(str, words)], check=True, stdout=subprocess.DEVNULL, cwd="/"
        )

    run(programs / "initdb", "-D", data / "db", "-A", "trust")
    run(
        programs / "pg_ctl",
        "-D",
        data / "db",
        "-w",
        "-l",
        data / "log",
        "-o",
        f"-k {data} -c listen_addresses=",
        "start",
    )
    try:
        with PostgresSaver.from_conn_string(f"host={data} user=postgres dbname=postgres") as saver:
            saver.setup()
            yield saver
    finally:
        run(programs / "pg_ctl", "-D", data / "db", "-m", "fast", "stop")
    for path in (data / "db").iterdir():  # the tables are left, without the log
        if path.is_dir() and path.name != "base":
            shutil.rmtree(path)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


SAVERS: dict[str, Callable[[Path], Any]] = {"snapshotd": ours, "sqlite": sqlite, "postgres": postgres}


def measure(name: str, checkpoints: int, threads: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {verb: [] for verb in ("put", "put_writes", "get_tuple", f"list {LISTED}")}
    jobs = [(f"thread-{number}", conversation(checkpoints, number)) for number in range(threads * rounds)]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with SAVERS[name](Path(folder)) as saver, ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda job: talk(saver, *job, times), jobs))
        left = size_of(Path(folder)) // rounds
    row: dict[str, Any] = {"saver": name, "checkpoints": checkpoints, "threads": threads, "bytes": left}
    for verb, found in times.items():
        found.sort()
        row[verb] = {"p50": found[len(found) // 2] * 1e3, "p99": found[int(len(found) * 0.99)] * 1e3}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", default="10,1000")
    parser.add_argument("--threads", default="1,16")
    parser.add_argument("--only", default="snapshotd,sqlite,postgres")
    parser.add_argument("--json")
    asked = parser.parse_args()
    rows, verbs = [], ("put", "put_writes", "get_tuple", f"list {LISTED}")
    print(f"load {os.getloadavg()[0]:.1f}; milliseconds: p50 / p99")
    print("| checkpoints x threads | saver |", " | ".join(verbs), "| bytes |")
    print("|---|---|" + "---:|" * (len(verbs) + 1))
    for checkpoints in map(int, asked.checkpoints.split(",")):
        for threads in map(int, asked.threads.split(",")):
            for name in asked.only.split(","):
                try:
                    row = measure(name, checkpoints, threads, max(1, 200 // checkpoints // threads))
                except (ImportError, ValueError, OSError) as exc:
                    print(f"no figures for {name}: {exc}", file=sys.stderr)
                    continue
                rows.append(row)
                cells = [f"{row[verb]['p50']:.2f} / {row[verb]['p99']:.2f}" for verb in verbs]
                print(
                    f"| {checkpoints:,} x {threads} | {name} |", " | ".join(cells), f"| {row['bytes']:,} |", flush=True
                )
    if asked.json:
        Path(asked.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
