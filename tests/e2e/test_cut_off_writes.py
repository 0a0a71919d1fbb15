"""The daemon dies while files are put through an integration: each is there whole or not at all, what failed is told in the
framework's own words, and the sandbox goes on. So are a sandbox that is gone and a snapshot that never was."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2b_rig import served
from tests.e2e.plug_rig import ROOT, packages
from tests.e2e.support import Snap

PROGRAM = Path(__file__).with_name("programs") / "cut_off_writes.py"
PINS = {
    "deepagents": ("langchain_tests", "langchain-tests==1.1.9", "deepagents==0.7.32", "langgraph==1.2.24"),
    "inspect-ai": ("inspect_ai", "inspect-ai==0.3.285", "pytest-asyncio==1.5.0", "pytest==9.2.0"),
    "swe-rex": ("swerex", "swe-rex==1.4.0", "aiohttp==3.14.5", "pytest-asyncio==1.5.0", "pytest==9.2.0"),
}
"""As the files of these integrations have them, so that each set is downloaded once. The others have such a test of their own."""
pytestmark = [pytest.mark.runc, pytest.mark.usefixtures("plugged"), pytest.mark.timeout(300, func_only=True)]


@contextlib.contextmanager
def environment(kind: str, snap: Snap, place: Path) -> Iterator[dict[str, str]]:
    if kind != "e2b":
        yield {**snap.env, "PYTHONPATH": f"{packages(*PINS[kind])}:{ROOT}", "SWE_REX_LOG_STREAM_LEVEL": "ERROR"}
        return
    with served(snap, place, "--network", "none", "--image", "minimal") as server:
        yield {**snap.env, **server.env, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    ("kind", "failed", "never", "gone"),
    [
        ("deepagents", "an answer", "none: the program makes the sandbox", "an answer"),
        ("inspect-ai", "SandboxUnavailableError", "SandboxUnavailableError", "SandboxUnavailableError"),
        ("swe-rex", "SwerexException", "DeploymentStartupError", "SwerexException"),
        pytest.param(  # a client that goes away while it uploads: test_e2b.py
            "e2b", "SandboxException", "SandboxException", "SandboxNotRunningException", marks=pytest.mark.long
        ),
    ],
)
def test_a_file_is_put_whole_or_not_at_all(
    kind: str, failed: str, never: str, gone: str, plugged: Snap, tmp_path: Path
) -> None:
    with environment(kind, plugged, tmp_path) as env:
        program = subprocess.Popen(
            [sys.executable, PROGRAM, kind], env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        with program:
            assert program.stdout.readline() == "begun\n"
            plugged.kill_daemon()
            told = json.loads(program.stdout.readline())
        assert program.returncode == 0
    assert set(told["writes"]) <= {"", failed}
    assert set(told["files"]) <= {"whole", "absent"}
    assert all(file == "whole" for write, file in zip(told["writes"], told["files"], strict=True) if not write)
    assert (told["after"], told["never"], told["gone"]) == ("after", never, gone)
