"""Agents that `snapshotd run NAME` knows: for each a TOML file that says how its program comes into a sandbox.

    npm       a package with its version, which npm installs here once ({npm_arch}: x64 or arm64)
    folder    or a folder of this machine that holds the program
    command   the command in the sandbox ({program}: the folder there, of npm its node_modules; {arch}: x86_64, aarch64)
    provider  the kind of provider that it talks to, through the gateway; may be left out
    [env]     its environment

Files come with snapshotd (`agents/`); those in a user's `~/.config/snapshotd/agents` go first.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.config import passed_on
from snapshotd.errors import NotFound, SandboxFailed, UsageError

SHIPPED = Path(__file__).parent / "agents"
PLACE = "/opt/agent-program"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_FIELDS = {"npm": str, "folder": str, "command": list, "provider": str, "env": dict}
_NPM_ARCH = {"x86_64": "x64", "aarch64": "arm64"}
_NPM_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """One agent. `install`: returns the folder with its program, made if it is not there; None: the image has it."""

    name: str
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    provider: str | None
    npm: str | None
    folder: Path | None

    def install(self, progress: Callable[[str], object]) -> Path | None:
        """SandboxFailed: npm is not there, or fails."""
        return self.folder if self.npm is None else _from_npm(self.name, self.npm, progress)


def names() -> list[str]:
    """The agents that are known here."""
    return sorted({path.stem for place in _places() for path in place.glob("*.toml") if _NAME.fullmatch(path.stem)})


def load(name: str) -> AgentProfile:
    """NotFound; UsageError: its file is malformed."""
    path = next((place / f"{name}.toml" for place in _places() if (place / f"{name}.toml").is_file()), None)
    if path is None or not _NAME.fullmatch(name):
        raise NotFound(f"no agent {name[:40]!r} is known; there are {', '.join(names())}")
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read as TOML: {exc}") from exc
    _check(path, found)
    words = {"program": PLACE, "arch": platform.machine(), "npm_arch": _NPM_ARCH.get(platform.machine(), "x64")}

    def filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: words.get(match[1], match[0]), text)

    npm = found.get("npm")
    return AgentProfile(
        name,
        tuple(map(filled, found["command"])),
        tuple((key, filled(value)) for key, value in found.get("env", {}).items()),
        found.get("provider"),
        None if npm is None else filled(npm),
        None if "folder" not in found else Path(found["folder"]).expanduser(),
    )


def _places() -> tuple[Path, Path]:
    return _base("XDG_CONFIG_HOME", ".config") / "agents", SHIPPED


def _base(variable: str, default: str) -> Path:
    given = passed_on([variable]).get(variable)
    return (Path(given) if given else Path.home() / default) / "snapshotd"


def _check(path: Path, found: dict[str, Any]) -> None:
    for key, value in found.items():
        if key not in _FIELDS or not isinstance(value, _FIELDS[key]):
            raise UsageError(
                f"{path}: {key!r} is no field of an agent, or of another type; there are {', '.join(_FIELDS)}"
            )
    texts = [*found.get("command", ()), *found.get("env", {}).values()]
    if not found.get("command") or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path}: `command` is a list of words, and `env` has texts; repair it")
    if "npm" in found and "folder" in found:
        raise UsageError(f"{path}: the program comes from `npm` or from a `folder`, not both; take one out")


def _from_npm(name: str, package: str, progress: Callable[[str], object]) -> Path:
    """The `node_modules` of a package, installed once for each version. No script of a package is run."""
    base = _base("XDG_CACHE_HOME", ".cache") / "agents"
    made = base / re.sub(r"[^A-Za-z0-9.-]+", "-", package).strip("-")
    if (made / "node_modules").is_dir():
        return made / "node_modules"
    base.mkdir(parents=True, exist_ok=True)
    progress(f"installing {package}, once")
    with tempfile.TemporaryDirectory(dir=base, prefix=".new-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        words = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(fresh), package]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_NPM_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise SandboxFailed(
                f"{name} cannot be installed, because npm cannot be run ({exc}); install npm, or name a `folder` in a file of "
                f"your own ({_places()[0] / f'{name}.toml'})"
            ) from exc
        if done.returncode != 0 or not (fresh / "node_modules").is_dir():
            raise SandboxFailed(f"{name} cannot be installed: npm says {done.stderr.strip()[-500:]!r}")
        if made.exists():
            shutil.rmtree(made)  # another process has just made it, or half of it
        os.rename(fresh, made)
    return made / "node_modules"
