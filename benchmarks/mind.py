"""What going back and going on cost: `python benchmarks/mind.py [--state-dir DIR]` (as root; else with a daemon and an
image of its own).

Rewind, in place, over a step that made one file and over one that made 20,000: the ratio should be near 1. Resume: the
time in which a program meets 100 recorded calls, as it sees it itself. Figures of one run on one machine: compare
within a run. `--only reuse`: a run of 30 calls that take 1 s each, and the same with `--reuse`; `--image` names another
image.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from snapshotd.client import Provider, Snapshotd
from snapshotd.testing.provider import ScriptedProvider

ROUNDS = 60
MANY = 20_000
SCRIPTS = {"one": "echo 1 > file", "many": f"mkdir d; cd d; for i in $(seq {MANY}); do echo $i > $i; done"}
CALLS = 100
PROGRAM = f"""
import os, time
from snapshotd.agent import tool
first_time = []
@tool
def call(number):
    first_time.append(number)
    with open("/workspace/log", "a") as log:
        log.write("%d\\n" % number)
began = time.perf_counter()
for number in range({CALLS}):
    call(number)
print(time.perf_counter() - began, flush=True)
if first_time:
    os._exit(9)
"""

SLOW_CALLS = 30
SLOW = f"""
import time
from snapshotd.agent import tool
@tool
def call(number):
    time.sleep(1)
    with open("/workspace/log", "a") as log:
        log.write("%d\\n" % number)
for number in range({SLOW_CALLS}):
    call(number)
"""
ASKED = 150
"""Requests for each figure of the gateway."""
WARM = 10
"""Requests before them: the first opens connections and imports what they need."""
ASKING = f"""
import http.client, json, socket, statistics, sys, time, urllib.parse
from snapshotd.kernel.namespaces import in_network_namespace
provider, sandbox = urllib.parse.urlsplit(sys.argv[1]), int(sys.argv[2])
ways = [http.client.HTTPConnection(provider.hostname, provider.port), http.client.HTTPConnection("127.0.0.1", 11411)]
ways[0].connect()
in_network_namespace(sandbox, ways[1].connect)
for way in ways:
    way.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
said = [{{"role": ("user", "assistant")[number % 2], "content": "x" * 800}} for number in range(81)]
tools = [{{"name": "t%d" % number, "description": "d" * 1500, "input_schema": {{"type": "object"}}}} for number in range(20)]
first, whole = ([], []), ([], [])
for number in range({WARM + ASKED}):
    if number == {WARM}:
        first, whole, worked = ([], []), ([], []), time.clock_gettime(int(sys.argv[3]))
    said[-1] = {{"role": "user", "content": "number %d" % number}}
    body = {{"model": "m", "max_tokens": 9, "stream": True, "system": "s" * 20000, "tools": tools, "messages": said}}
    text = json.dumps(body).encode()
    for index in (0, 1) if number % 2 else (1, 0):
        began = time.perf_counter()
        ways[index].request("POST", "/v1/messages", text, {{"content-type": "application/json"}})
        answer = ways[index].getresponse()
        first[index].append(1000 * (time.perf_counter() - began))
        answer.read()
        whole[index].append(1000 * (time.perf_counter() - began))
worked = 1000 * (time.clock_gettime(int(sys.argv[3])) - worked) / {ASKED}
print(json.dumps([[[min(times), statistics.median(times)] for times in (*first, *whole)], worked]))
"""
"""Asks the provider itself, and through the gateway of a sandbox, in turns: other work on the machine meets both."""


class Cost(NamedTuple):
    """In milliseconds: what the caller waits, and what the daemon works (all threads, kernel too), which other load
    hardly touches."""

    waited: float
    worked: float


UNMODIFIED = """
import http.client, json, os, time, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
http = http.client.HTTPConnection(url.hostname, url.port)
waited = 0.0
def ask(body):
    global waited
    began = time.perf_counter()
    http.request("POST", url.path + "/chat/completions", body, {"content-type": "application/json"})
    answer = http.getresponse().read()
    waited += time.perf_counter() - began
    return answer
said = [{"role": "system", "content": "You count."}, {"role": "user", "content": "Count."}]
began = time.perf_counter()
while True:
    body = json.dumps({"model": "scripted", "messages": said, "tools": []})
    message = json.loads(ask(body.encode()))["choices"][0]["message"]
    said.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        with open("/workspace/log", "a") as log:
            log.write(call["function"]["arguments"] + chr(10))
        said.append({"role": "tool", "tool_call_id": call["id"], "content": "written"})
print(time.perf_counter() - began, waited, flush=True)
os._exit(9)
"""
"""An agent that knows nothing of snapshotd; one connection, and its tool is its own code."""


def rewinds(client: Snapshotd) -> dict[tuple[str, str], list[Cost]]:
    """Of each verb over each of `SCRIPTS`, in turns, so that what else the machine does meets all alike.

    Each begins when nothing is left to do in the background: counting what changed takes as long as much did, and goes
    on after the verb has returned, so it would be measured as a part of the next one.
    """
    begun = {what: client.create(runtime="runc") for what in SCRIPTS}
    for what, (trajectory, _) in begun.items():
        client.exec(trajectory.id, ["sh", "-c", SCRIPTS[what]])
        _rest(client, trajectory.id)
    costs: dict[tuple[str, str], list[Cost]] = {(verb, what): [] for verb in ("rewind", "undo") for what in SCRIPTS}
    clock = _cpu_clock(client)
    for number in range(ROUNDS):
        for what in sorted(SCRIPTS, reverse=bool(number % 2)):
            trajectory, first = begun[what]
            for verb in ("rewind", "undo"):
                before = time.perf_counter(), time.clock_gettime(clock)
                if verb == "rewind":
                    client.rewind(trajectory.id, first.id)
                else:
                    client.undo(trajectory.id)
                after = time.perf_counter(), time.clock_gettime(clock)
                costs[verb, what].append(Cost(*((b - a) * 1e3 for a, b in zip(before, after, strict=True))))
                _rest(client, trajectory.id)
    for trajectory, _ in begun.values():
        client.remove(trajectory.id, force=True)
    return costs


def _rest(client: Snapshotd, trajectory: str) -> None:
    client.flush(trajectory)
    time.sleep(0.1)  # what that has evicted from the processor's caches meets the next verb, whichever it is


def _cpu_clock(client: Snapshotd) -> int:
    """The clock of all that the daemon has worked (clock_gettime(2): the complement of the process id, and 2 for the
    scheduler's)."""
    pid = client.version().pid
    return ~pid << 3 | 2


def _compare(costs: dict[tuple[str, str], list[Cost]]) -> None:
    for verb in ("rewind", "undo"):
        for index, of in enumerate(Cost._fields):
            one, many = (statistics.median(cost[index] for cost in costs[verb, what]) for what in ("one", "many"))
            print(
                f"{verb}, {of}: one file {one:.2f} ms, {MANY:,} files {many:.2f} ms, ratio {many / one:.2f}; medians of {ROUNDS}"
            )


def replay(client: Snapshotd, folder: Path) -> tuple[float, float]:
    """Seconds for a program's calls when they run, and when they are met again."""
    program = folder / "agent.py"
    program.write_text(PROGRAM)
    trajectory = client.run(agent=program, runtime="runc")
    ran = float(_output(client, trajectory.id))
    client.resume(trajectory.id)
    met = float(_output(client, trajectory.id))
    client.remove(trajectory.id, force=True)
    return ran, met


def replay_turns(client: Snapshotd, folder: Path) -> tuple[list[float], list[float]]:
    """For an agent behind the gateway: seconds of its turns, and what of that it waited for the gateway; live, and met
    again."""
    program = folder / "unmodified.py"
    program.write_text(UNMODIFIED)
    script = [{"calls": [{"name": "write", "arguments": {"number": number}}]} for number in range(CALLS)]
    with ScriptedProvider([*script, {"text": "That was all."}]) as provider:
        trajectory = client.run(
            agent=program, runtime="runc", providers=[Provider("openai", provider.url, "key-of-the-script")]
        )
        live = _output(client, trajectory.id)
        asked = len(provider.requests)
        client.resume(trajectory.id)
        met = _output(client, trajectory.id)
        if len(provider.requests) != asked:
            raise SystemExit("the provider was asked again in the replay")
    client.remove(trajectory.id, force=True)
    return [float(word) for word in live.split()], [float(word) for word in met.split()]


def requests(client: Snapshotd) -> None:
    """A request for a model's reply, and its head, direct and through the gateway."""
    with ScriptedProvider({"by": "sequence", "steps": [{"text": "It is so."}] * (2 * (WARM + ASKED))}) as provider:
        trajectory = client.run(
            command=["sleep", "infinity"],
            runtime="runc",
            providers=[Provider("anthropic", provider.url, "key-of-the-script")],
        )
        sandbox = next(one for one in client.sandboxes() if one.trajectory.id == trajectory.id)
        asking = [sys.executable, "-c", ASKING, provider.url, str(sandbox.pid), str(_cpu_clock(client))]
        told = subprocess.run(asking, check=True, capture_output=True, text=True)
    client.remove(trajectory.id, force=True)
    times, worked = json.loads(told.stdout)
    for what, direct, through in (("head", times[0], times[1]), ("end", times[2], times[3])):
        print(
            f"a model request of 100 KB, to its reply's {what}: direct {direct[1]:.2f} ms, through the gateway "
            f"{through[1]:.2f}, more {through[1] - direct[1]:.2f}; least {direct[0]:.2f}, {through[0]:.2f}, "
            f"{through[0] - direct[0]:.2f}; medians of {ASKED} requests in turns"
        )
    print(f"the daemon works {worked:.2f} ms for a model request")


def reuse(client: Snapshotd, folder: Path, image: str) -> None:
    """Print how long a run takes, and a second one that is answered from the first."""
    program = folder / "slow.py"
    program.write_text(SLOW)
    for name in ("live", "reused"):
        began = time.perf_counter()
        run = client.run(agent=program, runtime="runc", image=image, reuse=name == "reused")
        (*_, finished) = client.events(run.id)
        took = time.perf_counter() - began
        counted = finished.get("reused", {"calls": 0, "of": SLOW_CALLS})
        print(f"{name}: {took:.2f} s, {counted['calls']} of {counted['of']} calls reused", flush=True)


def _output(client: Snapshotd, trajectory: str) -> str:
    events = [event for event in client.events(trajectory) if event["event"] == "output"]
    return b"".join(base64.b64decode(event["data_b64"]) for event in events).decode().splitlines()[-1]


def measure(client: Snapshotd, folder: Path, only: str | None, image: str) -> None:
    if only == "reuse":
        reuse(client, folder, image)
    if only in (None, "rewind"):
        _compare(rewinds(client))
    if only in (None, "calls"):
        ran, met = replay(client, folder)
        print(f"{CALLS} calls: {ran:.2f} s when they run, {met:.2f} s when they are met again")
    if only in (None, "turns"):
        for what, (took, waited) in zip(("live", "met again"), replay_turns(client, folder), strict=True):
            print(
                f"{CALLS} turns behind the gateway, {what}: {took:.2f} s, of which the agent waited {waited:.2f} s for answers"
            )
    if only in (None, "gateway"):
        requests(client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-dir", type=Path, help="of a daemon that has the image `default`")
    parser.add_argument("--only", choices=("rewind", "calls", "turns", "gateway", "reuse"))
    parser.add_argument("--image", default="default", help="of the runs of --only reuse")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="snapshotd-bench-"))
    client = Snapshotd(state_dir=options.state_dir or folder / "state")
    try:
        if options.state_dir is None:
            client.build_image("default", progress=lambda line: print(line, file=sys.stderr))
        measure(client, folder, options.only, options.image)
    finally:
        if options.state_dir is None:
            subprocess.run(
                [sys.executable, "-m", "snapshotd", "--state-dir", str(folder / "state"), "daemon", "--stop"],
                check=False,
            )
        shutil.rmtree(folder, ignore_errors=True)


main()
