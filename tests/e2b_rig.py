"""What the tests of `snapshotd serve --e2b` share: the server as a process of its own, and the environment of its clients."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.support import Snap

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Served:
    """A running server."""

    address: str
    key: str
    process: subprocess.Popen[str]

    @property
    def env(self) -> dict[str, str]:
        """What its clients have in their environment."""
        return {
            "E2B_API_URL": self.address,
            "E2B_SANDBOX_URL": self.address,
            "E2B_API_KEY": self.key,
            "E2B_DOMAIN": f"localhost:{self.address.rpartition(':')[2]}",
        }


@contextlib.contextmanager
def served(snap: Snap, folder: Path, *options: str) -> Iterator[Served]:
    """`snapshotd serve --e2b` of a daemon. It ends by a signal, and says nothing but its address."""
    key_file = folder / "e2b.key"
    command = [
        sys.executable,
        "-m",
        "snapshotd",
        "serve",
        "--e2b",
        "--listen",
        "http://127.0.0.1:0",
        "--key-file",
        str(key_file),
        *options,
    ]
    with open(folder / "server.log", "w+") as log:
        process = subprocess.Popen(command, env=snap.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.match(r"export E2B_API_URL=(\S+) E2B_SANDBOX_URL=\S+ E2B_API_KEY=", said)
        try:
            assert found is not None, said + (folder / "server.log").read_text()
            yield Served(found[1], key_file.read_text().split()[0], process)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(30)
            process.stdout.close()
            log.seek(0)
            errors = log.read()
        assert code in (0, -signal.SIGTERM), errors
        assert errors == "", errors


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables are set within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
