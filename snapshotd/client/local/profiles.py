"""Agents that `snapshotd run NAME` knows: for each a TOML file that says how its program comes into a sandbox.

    npm       packages with their versions, which npm installs here once ({npm_arch}: x64 or arm64); a list, or one
    pip       or requirements, which pip installs once for each image, into a layer; a list, or one
    folder    or a folder of this machine that holds the program
    command   the command in the sandbox ({program}: the folder there, of npm its node_modules; {arch}: x86_64, aarch64)
    provider  the kinds of provider that it can talk to, through the gateway: a list, or one; may be left out
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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.config import config_folder, read_variables
from snapshotd.errors import NotFound, SandboxFailed, UsageError

SHIPPED = Path(__file__).parent / "agents"
PLACE = "/opt/agent-program"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_WORDS = (str, list)
_FIELDS: dict[str, Any] = {
    "npm": _WORDS,
    "pip": _WORDS,
    "folder": str,
    "command": list,
    "provider": _WORDS,
    "env": dict,
}
_SOURCES = ("npm", "pip", "folder")
_NPM_ARCH = {"x86_64": "x64", "aarch64": "arm64"}
_NPM_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """One agent. `install`: returns the folder with its program, made if it is not there; None: the image has it, or
    the `requirements` bring it."""

    name: str
    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    providers: tuple[str, ...]
    npm: tuple[str, ...]
    pip: tuple[str, ...]
    folder: Path | None

    def install(self, progress: Callable[[str], object]) -> Path | None:
        """SandboxFailed: npm is not there, or fails."""
        return _from_npm(self.name, self.npm, progress) if self.npm else self.folder

    def requirements(self) -> Path | None:
        """A file with its Python packages; None if it has none."""
        if not self.pip:
            return None
        path = _base("XDG_CACHE_HOME", ".cache") / "agents" / f"{self.name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text("".join(f"{line}\n" for line in self.pip))
        fresh.replace(path)
        return path

    def provider(self, named: Collection[str]) -> str | None:
        """The kind of provider to add to those that a user `named`: the first whose key is here, else the first. None
        if the agent can talk to one of them."""
        if not self.providers or any(kind in named for kind in self.providers):
            return None
        keys = read_variables([f"{kind.upper()}_API_KEY" for kind in self.providers])
        return next((kind for kind in self.providers if keys.get(f"{kind.upper()}_API_KEY")), self.providers[0])


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

    return AgentProfile(
        name,
        tuple(map(filled, found["command"])),
        tuple((key, filled(value)) for key, value in found.get("env", {}).items()),
        _words(found, "provider"),
        tuple(map(filled, _words(found, "npm"))),
        _words(found, "pip"),
        None if "folder" not in found else Path(found["folder"]).expanduser(),
    )


def _words(found: dict[str, Any], key: str) -> tuple[str, ...]:
    value = found.get(key, [])
    return (value,) if isinstance(value, str) else tuple(value)


def _places() -> tuple[Path, Path]:
    return config_folder() / "agents", SHIPPED


def _base(variable: str, default: str) -> Path:
    given = read_variables([variable]).get(variable)
    return (Path(given) if given else Path.home() / default) / "snapshotd"


def _check(path: Path, found: dict[str, Any]) -> None:
    for key, value in found.items():
        if key not in _FIELDS or not isinstance(value, _FIELDS[key]):
            raise UsageError(
                f"{path}: {key!r} is no field of an agent, or of another type; there are {', '.join(_FIELDS)}"
            )
    lists = [word for key in ("npm", "pip", "provider") for word in _words(found, key)]
    texts = [*found.get("command", ()), *found.get("env", {}).values()]
    if not found.get("command") or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path}: `command` is a list of words, and `env` has texts; repair it")
    if not all(isinstance(word, str) and word.isprintable() for word in lists):
        raise UsageError(f"{path}: `npm`, `pip` and `provider` are words, or lists of words; repair them")
    if sum(key in found for key in _SOURCES) > 1:
        raise UsageError(f"{path}: the program comes from one of {', '.join(_SOURCES)}; take the others out")


def _from_npm(name: str, packages: tuple[str, ...], progress: Callable[[str], object]) -> Path:
    """The `node_modules` of packages, installed once for each version. No script of a package is run."""
    base, package = _base("XDG_CACHE_HOME", ".cache") / "agents", " ".join(packages)
    made = base / re.sub(r"[^A-Za-z0-9.-]+", "-", package).strip("-")
    if (made / "node_modules").is_dir():
        return made / "node_modules"
    base.mkdir(parents=True, exist_ok=True)
    progress(f"installing {package}, once")
    with tempfile.TemporaryDirectory(dir=base, prefix=".new-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        words = [
            "npm",
            "install",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--omit=optional",
            "--prefix",
            str(fresh),
        ]
        try:
            done = subprocess.run(
                [*words, *packages], capture_output=True, text=True, timeout=_NPM_TIMEOUT_S, check=False
            )
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
