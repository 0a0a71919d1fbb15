"""What sandboxes see read-only, at the start of another daemon: they may still be looking at it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.daemon import library
from snapshotd.daemon.library import write_share
from snapshotd.errors import Unsupported


@pytest.fixture
def init(tmp_path: Path) -> Path:
    """What stands for the init program."""
    program = tmp_path / "catatonit"
    program.write_bytes(b"one")
    return program


def _inodes(share: Path) -> dict[Path, int]:
    return {path.relative_to(share): path.stat().st_ino for path in (share, *share.rglob("*"))}


def test_it_is_left_alone_when_it_is_right(tmp_path: Path, init: Path) -> None:
    share = tmp_path / "shares" / "instance"
    assert write_share(share, ("/no/such/catatonit", str(init))) == share
    before = _inodes(share)
    times = {name: (share / name).stat().st_mtime_ns for name in before}
    assert {Path("init"), Path("lib/snapshotd/__init__.py"), Path("lib/snapshotd/agent/__init__.py")} < before.keys()
    assert not [name for name in before if name.suffix == ".new"]
    write_share(share, ("/no/such/catatonit", str(init)))
    assert _inodes(share) == before
    assert {name: (share / name).stat().st_mtime_ns for name in before} == times


def test_what_changed_is_replaced_and_directories_stay(tmp_path: Path, init: Path) -> None:
    """Whoever has the old file open goes on with it; a directory that is looked at shows the new one."""
    share = write_share(tmp_path / "share", ("/no/such/catatonit", str(init)))
    before = _inodes(share)
    agent = share / "lib/snapshotd/agent"
    right = (agent / "__init__.py").read_bytes()
    (agent / "__init__.py").write_bytes(b"an older library")
    (agent / "__init__.py").chmod(0o600)
    (agent / "old.py").write_bytes(b"")
    (agent / "gone/deeper").mkdir(parents=True)
    (agent / "gone/deeper/file").touch()
    init.write_bytes(b"two")
    library = os.open(agent, os.O_RDONLY | os.O_DIRECTORY)
    with open(share / "init", "rb") as old:
        write_share(share, ("/no/such/catatonit", str(init)))
        assert old.read() == b"one"
    assert (share / "init").read_bytes() == b"two"
    assert sorted(os.listdir(library)) == sorted(os.listdir(agent))
    os.close(library)
    assert (agent / "__init__.py").read_bytes() == right
    after = _inodes(share)
    assert {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)} <= {
        Path("init"),
        Path("lib/snapshotd/agent/__init__.py"),
    }


def test_python_takes_the_compiled_library(tmp_path: Path, init: Path) -> None:
    """Nothing is compiled in a sandbox that has the daemon's Python, tracebacks name the file that it has, and no path
    of the host is told."""
    lib = write_share(tmp_path / "share", ("/no/such/catatonit", str(init))) / "lib"
    assert _imported(lib) == [f"{lib}/snapshotd/agent/tools.py", "compiled: []"]
    for path in lib.rglob("*.pyc"):
        assert os.fsencode(Path(library.__file__).parents[1]) not in path.read_bytes()


def test_a_source_that_changed_is_compiled_where_it_is_imported(tmp_path: Path, init: Path) -> None:
    """A sandbox may begin while a later daemon replaces one file after the other."""
    lib = write_share(tmp_path / "share", ("/no/such/catatonit", str(init))) / "lib"
    with (lib / "snapshotd/agent/tools.py").open("a") as source:
        source.write("\n")
    assert _imported(lib) == [f"{lib}/snapshotd/agent/tools.py", f"compiled: ['{lib}/snapshotd/agent/tools.py']"]


def _imported(lib: Path) -> list[str]:
    """Where a function of the library says that it comes from, and which of its files were compiled."""
    program = f"""
import sys
from importlib.machinery import SourceFileLoader
compiled, ordinary = [], SourceFileLoader.source_to_code
def noted(self, data, path, **more):
    compiled.append(path)
    return ordinary(self, data, path, **more)
SourceFileLoader.source_to_code = noted
import snapshotd.agent
from snapshotd.agent import tools
print(tools.tool.__code__.co_filename)
print("compiled:", [path for path in compiled if path.startswith({str(lib / "snapshotd/agent")!r})])
"""
    env = {"PYTHONPATH": str(lib), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd="/", env=env, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


def test_everybody_may_read_it(tmp_path: Path, init: Path) -> None:
    before = os.umask(0o077)
    try:
        share = write_share(tmp_path / "shares" / "instance", ("/no/such/catatonit", str(init)))
    finally:
        os.umask(before)
    for path in (share.parent, share, *share.rglob("*")):
        program = path.is_dir() or path.name in ("init", "snapshotd-agent", "snapshotd-line")
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if program else 0o644), path


def test_a_missing_init_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="catatonit is not installed"):
        write_share(tmp_path / "share", ("/no/such/catatonit",))
