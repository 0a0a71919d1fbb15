"""What LangGraph's savers cost, and how many bytes they leave: one table in one run. `make bench-savers`, or:

    python benchmarks/savers.py [--quick] [--checkpoints 10,1000,10000] [--threads 1,16] [--only snapshotd,sqlite]
                                [--limit SECONDS] [--markdown FILE] [--json FILE [--onto]]

A growing conversation: a checkpoint for each message, with the write that made it. A thread of 10,000 checkpoints keeps
its last 20 messages, since all of them would be 28 GB in SqliteSaver. Only the last 100 checkpoints of a thread are
measured, and every fifth time the thread is read, too. Then a prebuilt ReAct agent with a scripted model stores 50
checkpoints in a thread of its own, in the same place.

With several threads one conversation is stored, and the others are made long by copying its rows within the database, with
its bytes (saver_rigs.py); DynamoDB's mock stores them all. The measured checkpoints are stored by each thread itself.

Servers are started by saver_rigs.py, and a saver that cannot run here is named with the reason. One that would need more
than `--limit` to store what comes before is given up after 10 s. Figures of one run on one machine: compare within a run, and give ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.base.id import uuid6
from langgraph.prebuilt import create_react_agent
from saver_rigs import RIGS, NoFigures, end_daemon

WORDS = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text().split()
MEASURED, LOOK_EVERY, LISTED = 100, 5, 20
GROWING, KEPT = 1000, 20
"""Threads with more checkpoints keep only so many messages."""
GIVE_UP_S, TURNS = 10, 3
TOOL_CALLS = 24
"""With 25 replies and the input: 50 checkpoints."""
VERBS = ("put", "put_writes", "get_tuple", f"list {LISTED}", "ReAct run")
HEAD = f"| checkpoints x threads | saver | {' | '.join(VERBS)} | bytes |", "|---|---|" + "---:|" * (len(VERBS) + 1)
Times = dict[str, list[float]]


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


class Limit:
    """Gives up what would take too long. Its count is exact enough without a lock."""

    def __init__(self, seconds: float, checkpoints: int) -> None:
        self.seconds, self.left, self.all, self.began = seconds, checkpoints, checkpoints, time.monotonic()

    def one(self) -> None:
        self.left -= 1
        passed = time.monotonic() - self.began
        needed = passed * self.all / max(1, self.all - self.left)
        if passed > GIVE_UP_S and needed > self.seconds:
            raise NoFigures(f"to store these checkpoints would take {needed / 60:.0f} minutes")


class Talk:
    """A conversation that is stored message by message."""

    def __init__(self, thread: str, said: list[AnyMessage]) -> None:
        self.here: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        self.said, self.at, self.version, self.stored = said, self.here, None, 0

    def go_on(self, saver: Any, until: int, limit: Limit, times: Times) -> None:
        """Store what comes before message number `until`, and read it now and then."""
        for number in range(self.stored, until):
            limit.one()
            parent = self.at
            if number:
                writes, task = [("messages", [self.said[number]]), ("branch:to:model", None)], str(uuid.uuid4())
                timed(times["put_writes"], lambda: saver.put_writes(parent, writes, task, "~__pregel_pull, model"))  # noqa: B023
            checkpoint, metadata, versions = self._checkpoint(saver, number)
            self.at = timed(times["put"], lambda: saver.put(parent, checkpoint, metadata, versions))  # noqa: B023
            if until - number - 1 < MEASURED and number % LOOK_EVERY == LOOK_EVERY - 1:
                timed(times["get_tuple"], lambda: saver.get_tuple(self.here))
        self.stored = until

    def stands_as(self, other: Talk) -> None:
        """Its thread is now a copy of that one's."""
        self.at = {"configurable": {**other.at["configurable"], **self.here["configurable"]}}
        self.version, self.stored = other.version, other.stored

    def look(self, saver: Any, times: Times) -> None:
        for _ in range(3):
            timed(times[f"list {LISTED}"], lambda: list(saver.list(self.here, limit=LISTED)))

    def _checkpoint(self, saver: Any, number: int) -> Any:
        self.version = saver.get_next_version(self.version, None)
        versions = dict.fromkeys(("__start__", "messages", "branch:to:model"), self.version)
        first = 0 if len(self.said) <= GROWING else max(0, number + 1 - KEPT)
        checkpoint = {
            "v": 4,
            "id": str(uuid6()),
            "ts": "2026-11-25T07:00:00.000000+00:00",
            "channel_values": {"messages": self.said[first : number + 1], "branch:to:model": None},
            "channel_versions": versions,
            "versions_seen": {"__input__": {}, "__start__": {"__start__": self.version}, "model": versions},
            "updated_channels": ["messages"],
        }
        return checkpoint, {"source": "loop", "step": number, "parents": {}}, versions


class Scripted(BaseChatModel):
    """A model that calls the tool a number of times, and then answers."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        done = len(messages) // 2
        calls = [{"name": "look", "args": {"number": done}, "id": f"call_{done}"}] if done < TOOL_CALLS else []
        text = " ".join(WORDS[done * 20 : done * 20 + 20])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text, tool_calls=calls))])


@tool
def look(number: int) -> str:
    """Look at a part of the page."""
    return " ".join(WORDS[number * 40 : number * 40 + 40])


def react(saver: Any, thread: str, times: list[float]) -> None:
    """A run of a prebuilt agent, each step's checkpoint stored before the next step begins."""
    warnings.filterwarnings("ignore", "create_react_agent has been moved")  # to a package that needs much more
    agent = create_react_agent(Scripted(), [look], checkpointer=saver)
    place: Any = {"configurable": {"thread_id": thread}, "recursion_limit": 4 * TOOL_CALLS}
    state = timed(times, lambda: agent.invoke({"messages": ["go"]}, place, durability="sync"))
    assert len(state["messages"]) == 2 * TOOL_CALLS + 2


def measure(name: str, checkpoints: int, threads: int, limit_s: float, times: Times) -> int:
    """Adds to `times`, and returns the bytes on disk."""
    unmeasured: Times = {verb: [] for verb in VERBS}
    rounds = max(1, 2 * MEASURED // checkpoints // threads)
    talks = [
        Talk(f"{name}-{number}", conversation(checkpoints, number % threads)) for number in range(threads * rounds)
    ]
    agents = [f"agent-{number}" for number in range(max(threads, 4))]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        with RIGS[name][1](Path(folder), threads) as rig, ThreadPoolExecutor(threads) as pool:

            def every(work: Callable[[Any], None], given: Sequence[Any]) -> None:
                list(pool.map(work, given))

            before = max(0, checkpoints - MEASURED)
            fill = talks[:1] if rig.copy else talks
            limit = Limit(limit_s, len(fill) * before)
            rig.hurry(True)
            every(lambda talk: talk.go_on(rig.filler, before, limit, unmeasured), fill)
            if rig.copy and before:
                for talk in talks[1:]:
                    rig.copy(*(one.here["configurable"]["thread_id"] for one in (talks[0], talk)))
                    talk.stands_as(talks[0])
            rig.hurry(False)
            limit = Limit(limit_s, len(talks) * (checkpoints - before) + 3)
            Talk("warm", conversation(3, 0)).go_on(rig.saver, 3, limit, unmeasured)
            every(lambda talk: talk.go_on(rig.saver, checkpoints, limit, times), talks)
            every(lambda talk: talk.look(rig.saver, times), talks)
            every(lambda thread: react(rig.saver, thread, times["ReAct run"]), agents)
        return rig.size()


def row_group(names: Sequence[str], checkpoints: int, threads: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """A row for each saver. Short ones are measured in turns, since a disk is not the same at all times."""
    rows: list[dict[str, Any]] = [{"saver": name, "checkpoints": checkpoints, "threads": threads} for name in names]
    found: dict[str, Times] = {name: {verb: [] for verb in VERBS} for name in names}
    for _ in range(TURNS if checkpoints * threads <= GROWING else 1):
        for row in rows:
            if "none" in row:
                continue
            try:
                row["bytes"] = measure(row["saver"], checkpoints, threads, limit_s, found[row["saver"]])
            except Exception as exc:  # noqa: BLE001 - the other savers' clients raise what they like
                row["none"] = " ".join(str(exc).split())[:200]
    for row in rows:
        for verb, times in found[row["saver"]].items() if "none" not in row else ():
            times.sort()
            seconds = {
                "p50": times[len(times) // 2],
                "p99": times[int(len(times) * 0.99)],
                "mean": sum(times) / len(times),
            }
            row[verb] = {name: each * 1e3 for name, each in seconds.items()}
    yield from rows


def place_of(row: dict[str, Any]) -> tuple[int, int, int]:
    """Where it stands in the table."""
    return row["checkpoints"], row["threads"], list(RIGS).index(row["saver"])


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['checkpoints']:,} x {row['threads']}", RIGS[row["saver"]][0]]
    if "none" in row:
        return f"| {' | '.join(cells)} | {row['none']} |" + " |" * len(VERBS)
    cells += [f"{_short(row[verb]['p50'])} / {_short(row[verb]['p99'])}" for verb in VERBS]
    cells.append(f"{row['bytes']:,}" if row["bytes"] else "in memory")
    return f"| {' | '.join(cells)} |"


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", default="10,1000,10000")
    parser.add_argument("--threads", default="1,16")
    parser.add_argument("--only", default=",".join(RIGS))
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="to make the threads of a row long")
    parser.add_argument(
        "--quick", action="store_true", help="10 and 100 checkpoints, for a look at whether all of it runs"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here, with means")
    parser.add_argument(
        "--onto", action="store_true", help="keep the other rows of an earlier run that are in the file of --json"
    )
    asked = parser.parse_args()
    if asked.onto and not asked.json:
        parser.error("--onto keeps the rows of a file: name it with --json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so the servers are ended
    rows: list[dict[str, Any]] = json.loads(asked.json.read_text()) if asked.onto else []
    print(f"load {os.getloadavg()[0]:.1f}; milliseconds: p50 / p99", *HEAD, sep="\n", flush=True)
    try:
        for checkpoints in map(int, ("10,100" if asked.quick else asked.checkpoints).split(",")):
            for threads in map(int, asked.threads.split(",")):
                began = time.monotonic()
                for row in row_group(asked.only.split(","), checkpoints, threads, asked.limit):
                    rows = [other for other in rows if place_of(other) != place_of(row)] + [row]
                    print(line(row), flush=True)
                rows.sort(key=place_of)
                print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
                if asked.markdown:
                    asked.markdown.write_text("\n".join([*HEAD, *map(line, rows)]) + "\n")
                if asked.json:
                    asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        end_daemon()


if __name__ == "__main__":
    main()
