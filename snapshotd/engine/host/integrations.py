"""The integrations that come with snapshotd, each with the package that it is for: is that installed, in a version that it
knows, with all that it needs? One row of `INTEGRATIONS` adds another. Nothing is loaded for that, which would be 0.1 to 2 s
of CPU for each."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from snapshotd.errors import Unsupported

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Integration:
    """`extra`: of snapshotd, which is also its name. `package`: the one that it is for, from version `least` on, and below
    `below`. `purpose`: what a user gets."""

    extra: str
    package: str
    least: tuple[int, ...]
    below: tuple[int, ...]
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

    def misfit(self) -> str | None:
        """A fault of its package's version, or that it has none; None: it fits."""
        version = self.version()
        if version is None:
            return f"{self.package} is not installed"
        if not self.least <= _numbers(version) < self.below:
            return f"{self.package} is {version}, but {_text(self.least)} or newer below {_text(self.below)} is needed"
        return None

    def problem(self) -> str | None:
        """Why it cannot be used, as far as that is known without loading it."""
        if (misfit := self.misfit()) is not None:
            return misfit
        lacking = _lacking(self.package, set())
        return None if lacking is None else f"{self.package} needs {lacking}, which is not installed"


INTEGRATIONS = {
    one.extra: one
    for one in (
        Integration(
            "claude-agent",
            "claude-agent-sdk",
            (0, 2, 180),
            (0, 3),
            "sessions of the Claude Agent SDK, bound to the files of their folder",
        ),
        Integration(
            "deepagents", "deepagents", (0, 7, 32), (0, 8), "a sandbox for DeepAgents that goes back with its thread"
        ),
        Integration(
            "inspect-ai", "inspect-ai", (0, 3, 285), (0, 4), "sandboxes for Inspect AI, whose logs name snapshots"
        ),
        Integration("langgraph", "langgraph", (1, 2), (2,), "a saver and a store for LangGraph"),
        Integration(
            "e2b",
            "python-multipart",
            (0, 0, 20),
            (1,),
            "`snapshotd serve --e2b`, for E2B's SDKs and what is built on them",
        ),
        Integration("mcp", "mcp", (2, 3), (3,), "`snapshotd mcp`, for agents that speak MCP"),
        Integration(
            "mini-swe-agent",
            "mini-swe-agent",
            (2, 4, 6),
            (2, 5),
            "sandboxes for mini-swe-agent, whose trajectories name snapshots",
        ),
        Integration(
            "nemo-gym", "nemo-gym", (0, 4), (0, 5), "sandboxes for NeMo Gym, cloned and restored under a fence"
        ),
        Integration(
            "openai-agents", "openai-agents", (0, 24), (0, 25), "sandboxes and sessions for the OpenAI Agents SDK"
        ),
        Integration("otel", "opentelemetry-sdk", (1, 40), (2,), "spans of steps and model calls for OpenTelemetry"),
        Integration("ray", "ray", (2, 60), (3,), "functions beside their branches in a Ray cluster (docs/fleet.md)"),
        Integration(
            "swe-rex", "swe-rex", (1, 4), (1, 5), "a deployment for SWE-ReX, whose observations name snapshots"
        ),
    )
}


def require(extra: str) -> None:
    """Unsupported, with the command that installs it: the package of this integration is missing, too old or too new."""
    one = INTEGRATIONS[extra]
    if (misfit := one.misfit()) is not None:
        raise Unsupported(f"{misfit}: run `{one.install}`")


def require_at_import(extra: str) -> None:
    """As `require`, for the first line of an integration's module: ImportError, as for any module that cannot be imported."""
    try:
        require(extra)
    except Unsupported as exc:
        raise ImportError(exc.message) from None


def _lacking(package: str, seen: set[str]) -> str | None:
    """A package that this one needs, itself or by another one, on every machine, and that is not installed."""
    for text in importlib.metadata.requires(package) or ():
        name = _NAME.match(text)
        if name is None or ";" in text or name[0] in seen:  # behind the semicolon: an extra, a system, a Python
            continue
        seen.add(name[0])
        try:
            lacking = _lacking(name[0], seen)
        except importlib.metadata.PackageNotFoundError:
            lacking = name[0]
        if lacking is not None:
            return lacking
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
