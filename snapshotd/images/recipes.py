"""Recipes: folders that describe an image's content, and the mirrors that its packages come from.

    <name>/image.toml    suite, packages, variant, env, workdir
    <name>/files/        optional tree that is copied over the root (root's, readable by all, executable where it is here)
    <name>/customize     optional program, run as root inside the new root after the packages are installed

With the variant `machine`, the root has this machine's own programs (`machine.py`) and nothing else: env and workdir alone
can be chosen.

A recipe is trusted like a Makefile: it comes from the user, and its packages and `customize` run as root while the
image is built.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from snapshotd.errors import NotFound, UsageError
from snapshotd.types import NAME_PATTERN

BUILDER_VERSION = b"1"
"""Part of every recipe's digest. Raise it when the builder makes another tree from the same recipe."""
VARIANTS = ("essential", "apt", "required", "important", "minbase", "machine")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}")
_SUITE = re.compile(r"[a-z][a-z0-9-]{1,63}")
_KEYS = {"suite", "packages", "variant", "env", "workdir"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A parsed recipe. `source_id` is the digest of everything in it and of the machine's architecture."""

    name: str
    folder: Path
    suite: str
    packages: tuple[str, ...]
    variant: str
    env: tuple[tuple[str, str], ...]
    workdir: str
    source_id: str


@dataclass(frozen=True, slots=True)
class Mirror:
    """One archive for the package manager: `uri` and its suites, component main."""

    uri: str
    suites: tuple[str, ...]

    def public_uri(self) -> str:
        """Without the user name and password that a private mirror's address may hold."""
        parts = urlsplit(self.uri)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def shipped() -> dict[str, Path]:
    """The recipes that come with snapshotd, by name: from a checkout, or from the installed package."""
    here = Path(__file__).parent
    for folder in (here / "recipes", here.parent.parent / "sandbox-images"):
        if folder.is_dir():
            return {path.name: path for path in sorted(folder.iterdir()) if (path / "image.toml").is_file()}
    return {}


def find_recipe(ref: str) -> Recipe:
    """By the name of a shipped one, or the path of a folder. NotFound; UsageError when it is malformed."""
    path = shipped().get(ref) or Path(ref)
    if not (path / "image.toml").is_file():
        names = ", ".join(shipped()) or "none"
        raise NotFound(
            f"there is no recipe {ref}: neither one that comes with snapshotd ({names}) nor a folder with an image.toml"
        )
    return load_recipe(path)


def load_recipe(folder: Path) -> Recipe:
    """Parse `folder`/image.toml. UsageError names the key that is wrong."""
    try:
        data = tomllib.loads((folder / "image.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UsageError(f"{folder}/image.toml cannot be read: {exc}") from exc
    unknown = sorted(set(data) - _KEYS)
    if unknown:
        raise UsageError(f"{folder}/image.toml has the unknown key {unknown[0]}; known are {', '.join(sorted(_KEYS))}")
    variant = data.get("variant", "apt")
    if variant not in VARIANTS:
        raise UsageError(f"{folder}/image.toml: variant must be one of {', '.join(VARIANTS)}, not {variant!r}")
    suite, workdir, packages = (
        data.get("suite", "bookworm"),
        data.get("workdir", "/workspace"),
        data.get("packages", []),
    )
    if not isinstance(suite, str) or not _SUITE.fullmatch(suite):
        raise UsageError(f"{folder}/image.toml: suite must be a Debian release such as bookworm, not {suite!r}")
    if not isinstance(workdir, str) or not workdir.startswith("/"):
        raise UsageError(f"{folder}/image.toml: workdir must be an absolute path, not {workdir!r}")
    if not isinstance(packages, list) or not all(isinstance(p, str) and _PACKAGE.fullmatch(p) for p in packages):
        raise UsageError(f"{folder}/image.toml: packages must be a list of Debian package names")
    if variant == "machine" and ({"suite", "packages"} & set(data) or any(map(os.path.lexists, _additions(folder)))):
        raise UsageError(
            f"{folder}/image.toml: an image of this machine's programs has no packages; leave out suite, packages, files and "
            "customize, or choose another variant"
        )
    name = folder.resolve().name
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"the recipe folder's name {name!r} cannot be an image's name; use letters, digits, `.`, `_` and `-`"
        )
    return Recipe(
        name,
        folder.resolve(),
        suite,
        tuple(packages),
        variant,
        _env(folder, data.get("env", {})),
        workdir,
        _digest(folder),
    )


def _additions(folder: Path) -> tuple[Path, Path]:
    return folder / "files", folder / "customize"


def _env(folder: Path, env: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(env, dict) or not all(
        isinstance(v, str) and k and "=" not in k and "\0" not in k + v for k, v in env.items()
    ):
        raise UsageError(f"{folder}/image.toml: env must be a table of strings")
    return tuple(sorted(env.items()))


def _digest(folder: Path) -> str:
    """Digest of everything that decides the image: image.toml, customize and files/ (names, kinds, executable bits,
    content), and the architecture."""
    digest = hashlib.sha256(b"\0".join((b"snapshotd recipe", BUILDER_VERSION, platform.machine().encode())))
    for path in sorted((folder / "image.toml", folder / "customize", *(folder / "files").rglob("*")), key=os.fsencode):
        try:
            st = path.lstat()
        except FileNotFoundError:
            continue
        kind = stat.S_IFMT(st.st_mode)
        content = (
            path.read_bytes()
            if kind == stat.S_IFREG
            else os.fsencode(os.readlink(path))
            if kind == stat.S_IFLNK
            else b""
        )
        for field in (os.fsencode(path.relative_to(folder)), b"%d %d" % (kind, bool(st.st_mode & 0o100)), content):
            digest.update(b"%d:" % len(field) + field)
    return "recipe:" + digest.hexdigest()


# -- where packages come from ------------------------------------------------------------------------------------------


def host_mirrors(suite: str, apt_dir: Path = Path("/etc/apt")) -> list[Mirror]:
    """Debian's archives as this machine's own package manager reaches them, for `suite`. Empty when it has none: then
    the bootstrapper's default serves. Entries of others (signed by another key) are not used: an image is Debian's
    packages alone.
    """
    found: dict[str, list[str]] = {}
    for uri, suites, signed_by in _apt_entries(apt_dir):
        if not _is_debian(uri, signed_by):
            continue
        wanted = found.setdefault(uri.rstrip("/"), [])
        for host_suite in suites:
            suffix = next((s for s in ("-updates", "-security") if host_suite.endswith(s)), "")
            if suffix or not host_suite.endswith(("-backports", "-proposed-updates")):
                wanted.append(suite + suffix)
    return [Mirror(uri, tuple(dict.fromkeys(suites))) for uri, suites in found.items() if suites]


def _is_debian(uri: str, signed_by: str) -> bool:
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return False
    if signed_by:
        return Path(signed_by).name.startswith("debian-archive-")
    return parts.path.rstrip("/").endswith(("/debian", "/debian-security"))


def _apt_entries(apt_dir: Path) -> list[tuple[str, list[str], str]]:
    """(uri, suites, signed-by) of every enabled binary entry, in both of apt's formats."""
    entries = []
    for path in (apt_dir / "sources.list", *sorted((apt_dir / "sources.list.d").glob("*"))):
        if path.suffix not in (".list", ".sources"):
            continue
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # missing, or not ours to read: then it is not used
        entries += _deb822(text) if path.suffix == ".sources" else _one_line(text)
    return entries


def _deb822(text: str) -> list[tuple[str, list[str], str]]:
    entries = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and key:
                fields[key] += " " + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in (
            "no",
            "false",
            "0",
        ):
            suites = fields.get("suites", "").split()
            entries += [(uri, suites, fields.get("signed-by", "")) for uri in fields.get("uris", "").split()]
    return entries


def _one_line(text: str) -> list[tuple[str, list[str], str]]:
    entries = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)", line)
        if match:
            options = dict(part.partition("=")[::2] for part in shlex.split(match[1] or ""))
            entries.append((match[2], [match[3]], options.get("signed-by", "")))
    return entries
