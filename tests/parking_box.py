"""A container without a runtime, for agents that park in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import snapshotd
from snapshotd.engine.protocol.agent_handler import BodyWriter, Intent, Outcome
from snapshotd.engine.protocol.agent_protocol import AgentServer
from snapshotd.kernel import namespaces
from snapshotd.layers.pivot import Target, layout_of, pivot
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress
from snapshotd.types import ImageID, LayerID, Message, Stack, new_id

PYTHON = os.environ.get("SNAPSHOTD_TEST_AGENT_PYTHON", sys.executable)

INIT = """
import json, os, subprocess, sys
os.chdir("/")
print("ready", flush=True)
for line in sys.stdin:
    done = subprocess.run(**json.loads(line), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""
"""The box's pid 1. `python -c`, so that it holds nothing open on the root."""


class Box:
    """A container without a container runtime: the host's root as the image below an overlay, pivoted by the product's
    own code."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.parked: list[bool] = []
        self.pivots = 0
        self.before_answer: Callable[[], None] = lambda: None
        subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True
        )  # an upper layer may not lie in its lower one
        self._store = LayerStore(folder, "plain")
        image = ImageID(new_id())
        root = folder / "images" / image / "root"
        root.mkdir(parents=True)
        subprocess.run(["mount", "--bind", "/", str(root)], check=True)
        self._root = root
        self._init = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--mount-proc", PYTHON, "-c", INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "ready\n"
        pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text())
        self._target = Target.of(pid, None)
        self._stack = Stack(image)
        self._upper = self._layer()
        pivot(self._target, self._store, self._stack, self._upper, layout_of(self._target), seal=False)
        self.server = AgentServer(shared / "agent.sock", lambda: self, lambda pid: True)

    def _layer(self) -> LayerID:
        layer = self._store.create()
        dress(self._store, layer, self._stack)
        return layer

    def close(self) -> None:
        self.server.close()
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.close()
        self._init.wait(20)
        self._init.stdout.close()
        self._target.close()
        self._store.close()
        subprocess.run(["umount", str(self._root)], check=True)
        subprocess.run(["umount", str(self.folder)], check=True)

    def snapshot(self, pid: int) -> None:
        """What the engine does: seal the root and pivot, if the agent is parked."""
        is_parked = self.server.parked_pids() == {pid}
        self.parked.append(is_parked)
        if is_parked:
            self.snapshot_now()
        self.before_answer()

    def snapshot_now(self) -> None:
        self._stack = self._stack.push(self._upper)
        self._upper = self._layer()
        pivot(self._target, self._store, self._stack, self._upper, layout_of(self._target), seal=True)
        self.pivots += 1

    def inside(self, action: Callable[[], None]) -> None:
        namespaces.in_mount_namespace(self._target.mount_ns_fd, action)

    def run(self, source: str, *, check: bool = True) -> tuple[str, str]:
        """Run a program as an agent in /var/tmp/parking-test of the box. Returns its standard output and error."""
        argv = [PYTHON, "-c", textwrap.dedent(source)]
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(snapshotd.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SNAPSHOTD_AGENT_SOCKET": str(self.shared / "agent.sock"),
        }
        self.inside(lambda: os.makedirs("/var/tmp/parking-test", exist_ok=True))
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.write(json.dumps({"args": argv, "env": env, "cwd": "/var/tmp/parking-test"}) + "\n")
        self._init.stdin.flush()
        code, out, err = json.loads(self._init.stdout.readline())
        if check:
            assert code == 0, err
            assert err == ""
        return out, err

    # -- the handler ---------------------------------------------------------------------------------------------------

    def hello(self, pid: int) -> dict[str, Any]:
        return {"trajectory": "t", "snapshot": "s", "replaying": False}

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool) -> dict[str, Any]:
        return {"key": intent.call_id}

    def body_writer(self, call_id: str) -> BodyWriter:
        raise AssertionError("no large results here")

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        self.snapshot(pid)
        return "s"

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool) -> dict[str, Any]:
        self.snapshot(pid)
        return {"snapshot": "s"}

    def message(self, role: str, content: Any, within: str | None, rid: str | None) -> None:
        pass

    def messages(self, offset: int, limit: int) -> list[Message]:
        return []
