"""An agent whose calls have effects outside of its sandbox, a server that counts them, and something that kills in the
middle.

The agent's effects are over the network: what of them happened can be asked, as a person would who resumes a cut-off
agent.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import random
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snapshotd.errors import Undecided
from tests import way
from tests.dockerd import free_address
from tests.e2e.support import Snap, alive, processes_with, wait_until

CALLS = 30
VICTIMS = ("agent", "sandbox", "daemon", "machine")
ROUNDS = 40
"""Each is undisturbed with one half's chance: nobody is that unlucky."""
PROGRAM = """
import json, os, sys, urllib.request
from snapshotd.agent import current_call, message, state, tool, uuid

URL = sys.argv[1]

def effect(kind, number):
    query = "?kind=%s&number=%d&key=%s" % (kind, number, current_call().key)
    with urllib.request.urlopen(URL + query, data=b"", timeout=60) as answer:
        return json.load(answer)

@tool(side_effect="irreversible")
def charge(number):
    return effect("charge", number)

@tool(side_effect="idempotent")
def put(number):
    return effect("put", number)

@tool
def write(number, text):
    os.makedirs("files", exist_ok=True)
    with open("log", "a") as log:
        log.write("%d %s\\n" % (number, text))
    with open("files/%d" % number, "w") as file:
        file.write(text * 100)
    return {"lines": sum(1 for _ in open("log"))}

message("user", "do them all")
name = uuid()
for number in range(%CALLS%):
    if number % 3 == 0:
        done = charge(number)
    elif number % 3 == 1:
        done = put(number)
    else:
        done = write(number, "number %d after %d charges" % (number, state["charged"]))
    state["charged"] = number // 3 + 1
    message("assistant", {"number": number, "said": done})
message("assistant", {"all": "done", "name": name})
""".replace("%CALLS%", str(CALLS))


class Effects:
    """Counts what the agent does to the world; one request at a time, in the order in which they came."""

    def __init__(self, host: str) -> None:
        self.happened: Counter[tuple[str, int]] = Counter()
        self.keys: dict[tuple[str, int], set[str]] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fields = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
                answer = outer.happen(fields["kind"], int(fields["number"]), fields["key"])
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):  # the agent was killed in the middle
                    super().handle_one_request()

        class Server(http.server.HTTPServer):
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the same

        self._server = Server((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="effects"
        )
        self._thread.start()

    def happen(self, kind: str, number: int, key: str) -> dict[str, Any]:
        if kind == "put" and key in self.keys.get((kind, number), set()):
            return {"kind": kind, "number": number}  # an idempotent service: the same key again changes nothing
        self.keys.setdefault((kind, number), set()).add(key)
        self.happened[kind, number] += 1
        return {"kind": kind, "number": number}

    def settled(self) -> Counter[tuple[str, int]]:
        """What has happened, once everything that was sent has been handled (requests are taken in order)."""
        with urllib.request.urlopen(self.url, timeout=60):
            return self.happened.copy()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def reachable_address() -> Iterator[str]:
    """An address of this machine that sandboxes with a network reach."""
    if way.ADDRESS:
        yield way.ADDRESS
        return
    address = free_address(214)
    link = f"sndeff{os.getpid() % 1_000_000}"
    _ip("link", "add", "name", link, "type", "bridge")
    try:
        _ip("address", "add", f"{address}/24", "dev", link)
        _ip("link", "set", link, "up")
        yield address
    finally:
        _ip("link", "delete", link)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)


class Rig:
    """Runs the agent to its end, whatever is killed on the way."""

    def __init__(self, snap: Snap, runtime: str, folder: Path, host: str) -> None:
        self.snap, self.runtime, self.host = snap, runtime, host
        self.program = folder / "agent.py"
        self.program.write_text(PROGRAM)

    def undisturbed(self) -> tuple[dict[str, Any], float]:
        """What a run comes to that nobody disturbs, and how long it takes."""
        effects = Effects(self.host)
        try:
            began = time.monotonic()
            self.snap("run", "--quiet", *self._options("calm"), self.program, effects.url)
            took = time.monotonic() - began
            found = self.outcome("calm", effects)
        finally:
            effects.close()
        self.snap("rm", "--force", "calm")
        return found, took

    def disturbed(self, chance: random.Random, took: float) -> tuple[dict[str, Any], list[str]]:
        """What a run comes to in which agent, sandbox, daemon or all of them are killed at random times, also while
        they resume; and what was killed. After the daemon alone, the run goes on by itself."""
        effects = Effects(self.host)
        kills: list[str] = []
        name = f"wild-{chance.getrandbits(32):08x}"
        try:
            command = ["run", "--quiet", *self._options(name), self.program, effects.url]
            for _ in range(ROUNDS):
                process, before = self.snap.follow(*command), len(kills)
                if not kills or chance.random() < 0.5:
                    self._kill_after(chance.uniform(0, 1.1 * took), process, chance.choice(VICTIMS), kills)
                _, said = process.communicate(timeout=240)
                known = {one["name"]: one for one in self.snap.json("ls")}
                if name not in known:
                    continue  # killed before there was anything
                if known[name]["status"] == "finished":
                    break
                if "is running" in said:  # the daemon died after it had begun what its client was then told nothing of
                    self.snap("attach", "--quiet", name, code=None)
                else:
                    assert len(kills) > before, f"nothing was killed, and {command[0]} did not come to the end: {said}"
                command = ["resume", "--quiet", name, *self.decisions(name, effects)]
            else:
                raise AssertionError(f"{name} has not come to its end after {ROUNDS} resumes: killed {kills}")
            found = self.outcome(name, effects)
        finally:
            effects.close()
        self.snap("rm", "--force", name)
        return found, kills

    def at_failpoints(self, name: str, *armed: str) -> dict[str, Any]:
        """What a run comes to whose daemon dies at these failpoints (each is one's name and which hit), one after the
        other while it is resumed, and its sandbox with it each time."""
        effects = Effects(self.host)
        try:
            command: list[Any] = ["run", "--quiet", *self._options(name), self.program, effects.url]
            for failpoint in (*armed, ""):
                self.snap.stop_daemon()
                env = {**self.snap.env, "SNAPSHOTD_RECONNECT_S": "0", "SNAPSHOTD_FAILPOINT": failpoint}
                Snap(self.snap.state_dir, env)(*command, code=None)
                self.snap.forget_sandboxes()
                self.snap.stop_daemon()
                known = {one["name"]: one for one in self.snap.json("ls")}
                if name not in known:
                    continue
                if known[name]["status"] == "finished":
                    break
                command = ["resume", "--quiet", name, *self.decisions(name, effects)]
            found = self.outcome(name, effects)
        finally:
            effects.close()
        self.snap("rm", "--force", name)
        return found

    def _options(self, name: str) -> list[str]:
        own = ["--isolation", "none"] if self.runtime == "none" else ["--network", "bridge", "--runtime", self.runtime]
        return [*own, "--name", name]

    def decisions(self, name: str, effects: Effects) -> list[str]:
        """What a person would say who can ask the world whether a cut-off call happened."""
        happened = effects.settled()
        said: list[str] = []
        for entry in self.snap.json("journal", name):
            if entry["side_effect"] != "irreversible" or entry["status"] is not None:
                continue
            number = entry["arguments"]["number"]
            if happened["charge", number]:
                result = self.program.parent / f"result-{number}.json"
                result.write_text(json.dumps({"kind": "charge", "number": number}))
                said += ["--result", f"{entry['id']}={result}"]
            else:
                said += ["--retry", entry["id"]]
        if said:
            refused = self.snap("resume", name, code=None)
            assert refused.returncode == Undecided.exit_code, refused.stderr
            assert "nobody knows" in refused.stderr
        return said

    def outcome(self, name: str, effects: Effects) -> dict[str, Any]:
        """Files, conversation, state, journal and effects of a trajectory that has come to its end."""
        head = next(one for one in self.snap.json("ls") if one["name"] == name)["head"]
        files = {}
        for path in ("log", *(f"files/{number}" for number in range(2, CALLS, 3))):
            files[path] = self.snap("cat", f"{head}:/workspace/{path}").stdout
        journal = [
            (entry["kind"], entry["name"], json.dumps(entry["arguments"], sort_keys=True), entry["status"])
            for entry in self.snap.json("journal", head)
            if entry["status"] != "unknown"
        ]
        return {
            "files": files,
            "journal": journal,
            "conversation": self.conversation(head),
            "state": self.snap.json("state", head),
            "effects": sorted(effects.settled().items()),
        }

    def conversation(self, head: str) -> list[Any]:
        return [
            (message["role"], _without_name(message["content"]))
            for message in self.snap.json("show", "--conversation", head)
        ]

    def _kill_after(self, seconds: float, process: subprocess.Popen[str], victim: str, kills: list[str]) -> None:
        try:
            process.wait(seconds)
            return  # it has ended by itself
        except subprocess.TimeoutExpired:
            pass
        if victim == "machine":
            self.snap.crash()
            kills.append(victim)
            return
        pids = {"agent": self._agents, "sandbox": self._sandboxes, "daemon": self._daemons}[victim]()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if pids:
            kills.append(victim)
        if victim == "daemon":
            wait_until(lambda: not any(map(alive, pids)), "the daemon died")

    def _daemons(self) -> list[int]:
        return [
            pid for pid, line in processes_with("") if "snapshotd.daemon" in line and str(self.snap.state_dir) in line
        ]

    def _sandboxes(self) -> list[int]:
        return [one["pid"] for one in self.snap.json("ps")]

    def _agents(self) -> list[int]:
        return [
            pid
            for pid, line in processes_with("agent/agent.py http")
            if line.startswith(("python3 /agent/", "python3 ../agent/")) and self.host in line
        ]


def _without_name(content: Any) -> Any:
    """A uuid is another one in every run (and the same one throughout a run, which `name` being one key here tells)."""
    return {key: value for key, value in content.items() if key != "name"} if isinstance(content, dict) else content
