"""The integrations that come with snapshotd, each with the package that it is for: is that installed, in a version that it
knows, and does it work? One row of `INTEGRATIONS` adds another."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from snapshotd.errors import Unsupported

_TRY_S = 60


@dataclass(frozen=True, slots=True)
class Integration:
    """One integration. `extra`: its name, and that of the extra of snapshotd. `package`: the package that it is for,
    from version `least` to below `below`. `module`: our module; that it can be imported is the proof. `purpose`: what a
    user gets."""

    extra: str
    package: str
    least: tuple[int, ...]
    below: tuple[int, ...]
    module: str
    purpose: str

    @property
    def install(self) -> str:
        return f"pip install 'snapshotd[{self.extra}]'"

    def version(self) -> str | None:
        """The installed version of its package; None: it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def problem(self) -> str | None:
        """Why it cannot be used, as far as that is known without importing anything."""
        version = self.version()
        if version is None:
            return f"{self.package} is not installed"
        if not self.least <= _numbers(version) < self.below:
            return f"{self.package} is {version}, but {_text(self.least)} or newer below {_text(self.below)} is needed"
        return None


INTEGRATIONS = {
    one.extra: one
    for one in (
        Integration(
            "claude-agent",
            "claude-agent-sdk",
            (0, 2, 180),
            (0, 3),
            "snapshotd.integrations.claude_agent",
            "sessions of the Claude Agent SDK, bound to the files of their folder",
        ),
        Integration(
            "deepagents",
            "deepagents",
            (0, 7, 32),
            (0, 8),
            "snapshotd.integrations.deepagents",
            "a sandbox for DeepAgents that goes back with its thread",
        ),
        Integration(
            "inspect-ai",
            "inspect-ai",
            (0, 3, 285),
            (0, 4),
            "snapshotd.integrations.inspect_ai",
            "sandboxes for Inspect AI, whose logs name snapshots",
        ),
        Integration(
            "langgraph",
            "langgraph",
            (1, 2),
            (2,),
            "snapshotd.integrations.langgraph",
            "a saver and a store for LangGraph",
        ),
        Integration(
            "e2b",
            "python-multipart",
            (0, 0, 20),
            (1,),
            "snapshotd.integrations.e2b.server",
            "`snapshotd serve --e2b`, for E2B's SDKs and what is built on them",
        ),
        Integration(
            "mcp",
            "mcp",
            (2, 3),
            (3,),
            "snapshotd.integrations.mcp.server",
            "`snapshotd mcp`, for agents that speak MCP",
        ),
        Integration(
            "mini-swe-agent",
            "mini-swe-agent",
            (2, 4, 6),
            (2, 5),
            "snapshotd.integrations.mini_swe_agent",
            "sandboxes for mini-swe-agent, whose trajectories name snapshots",
        ),
        Integration(
            "nemo-gym",
            "nemo-gym",
            (0, 4),
            (0, 5),
            "snapshotd.integrations.nemo_gym",
            "sandboxes for NeMo Gym, cloned and restored under a fence",
        ),
        Integration(
            "openai-agents",
            "openai-agents",
            (0, 24),
            (0, 25),
            "snapshotd.integrations.openai_agents",
            "sandboxes and sessions for the OpenAI Agents SDK",
        ),
        Integration(
            "ray",
            "ray",
            (2, 60),
            (3,),
            "snapshotd.client.fleet.ray",
            "functions beside their branches in a Ray cluster (docs/fleet.md)",
        ),
        Integration(
            "otel",
            "opentelemetry-sdk",
            (1, 40),
            (2,),
            "snapshotd.integrations.otel",
            "spans of steps and model calls for OpenTelemetry",
        ),
        Integration(
            "swe-rex",
            "swe-rex",
            (1, 4),
            (1, 5),
            "snapshotd.integrations.swe_rex",
            "a deployment for SWE-ReX, whose observations name snapshots",
        ),
    )
}


@contextmanager
def require(extra: str) -> Iterator[None]:
    """Guard the imports of an integration, which stand inside. Unsupported, with the command that installs it: its
    package is missing, too old, too new, or cannot be imported."""
    one = INTEGRATIONS[extra]
    problem = one.problem()
    if problem is None:
        try:
            yield
            return
        except ImportError as exc:
            if isinstance(exc.__context__, Unsupported):
                raise exc.__context__ from None  # `require_at_import` has said it
            if (exc.name or "").startswith("snapshotd."):
                raise  # a fault of ours
            problem = f"{one.package} cannot be imported: {exc}"
            if isinstance(exc, ModuleNotFoundError):
                problem = f"the module {exc.name}, which snapshotd[{extra}] needs, is not installed"
    raise Unsupported(f"{problem}: run `{one.install}`")


@contextmanager
def require_at_import(extra: str) -> Iterator[None]:
    """Guard an integration's module as `require` does, but with ImportError, as for any module that cannot be
    imported."""
    try:
        with require(extra):
            yield
    except Unsupported as exc:
        raise ImportError(exc.message) from None


class Trial:
    """Imports an integration in a process of its own, so that a broken package harms nobody, and several at once."""

    def __init__(self, one: Integration) -> None:
        """Begin to import the integration."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import {one.module}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def failure(self) -> str | None:
        """Why it did not work; None: it does. Waits for its end."""
        try:
            _, said = self._process.communicate(timeout=_TRY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"it was not loaded within {_TRY_S} s"
        return None if self._process.returncode == 0 else (said.strip().splitlines() or ["it ended without a word"])[-1]


def try_all(found: Sequence[Integration]) -> list[tuple[Integration, str | None]]:
    """Import each integration. Returns each with the reason why it does not work; None: it works, or is not
    installed."""
    trials = [(one, None if one.problem() is not None else Trial(one)) for one in found]
    return [
        (one, trial.failure() if trial is not None else None if one.version() is None else one.problem())
        for one, trial in trials
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
