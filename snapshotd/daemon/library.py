"""The directory that every sandbox sees at /run/snapshotd/share: the in-sandbox library, and the init of containers."""

from __future__ import annotations

import importlib.util
import marshal
import os
import stat
from collections.abc import Sequence
from functools import cache
from importlib import resources
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from snapshotd.errors import Unsupported

_CHECKED_HASH = (0b11).to_bytes(4, "little")
"""Flags of a .pyc, as in PEP 552."""
_LIBRARY_TEXT = b'"""snapshotd inside a sandbox: only `snapshotd.agent` is here."""\n'


def write_share(share: Path, inits: Sequence[str] | None) -> Path:
    """Bring the directory up to date that every sandbox sees at /run/snapshotd/share: the init binary, if there are containers, and
    the in-sandbox library. `inits`: the places where this machine may have the binary; None: there are no containers.

    Sandboxes of an earlier daemon may still use it: directories stay the same ones, and a changed file is replaced at
    once.
    """
    wanted = dict(library())
    if inits is not None:
        init = next((path for path in inits if os.path.exists(path)), None)
        if init is None:
            raise Unsupported("no init for sandboxes: catatonit is not installed; `snapshotd setup` installs it")
        wanted[Path("init")] = Path(init).read_bytes()
    directories = {share / parent for name in wanted for parent in name.parents}
    for directory in sorted({share.parent, *directories}):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
    for path in sorted(share.rglob("*"), reverse=True):  # entries of a directory before the directory
        if path.is_dir() and path not in directories:
            path.rmdir()
        elif not path.is_dir() and path.relative_to(share) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        mode = 0o755 if name.name == "init" or name.parent.name == "bin" else 0o644
        if not _is_file(share / name, content, mode):
            temporary = share / name.with_name(f"{name.name}.new")
            temporary.write_bytes(content)
            temporary.chmod(mode)
            temporary.rename(share / name)
    return share


@cache
def library() -> dict[Path, bytes]:
    """The files of the in-sandbox library, which are read once in a process."""
    found = {Path("lib/snapshotd/__init__.py"): _LIBRARY_TEXT}
    with resources.as_file(resources.files("snapshotd") / "agent") as agent:
        for path in agent.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                name = "lib/snapshotd/agent" / path.relative_to(agent)
                found[name] = path.read_bytes()
                if path.suffix == ".py":
                    compiled = Path(importlib.util.cache_from_source(name)).name  # it may be kept in a folder elsewhere
                    found[name.parent / "__pycache__" / compiled] = _compile(path, found[name])
    return found


def _compile(source: Path, content: bytes) -> bytes:
    """Compile a module for sandboxes that have this Python; others compile it at each start. The compiled module has the hash of
    its source, which every import compares."""
    code = SourceFileLoader(source.stem, str(source)).get_code(source.stem)
    assert code is not None
    head = importlib.util.MAGIC_NUMBER + _CHECKED_HASH + importlib.util.source_hash(content)
    return head + marshal.dumps(_strip_path(code, source.name))


def _strip_path(code: CodeType, name: str) -> CodeType:
    """Return the code without the path on the host. An import fills in the path at which it finds the module."""
    constants = (_strip_path(one, name) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(constants))


def _is_file(path: Path, content: bytes, mode: int) -> bool:
    try:
        return stat.S_IMODE(path.stat().st_mode) == mode and path.read_bytes() == content
    except FileNotFoundError:
        return False
