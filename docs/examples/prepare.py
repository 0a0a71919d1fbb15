"""Make the demo's project: a pinned source release of sqlparse (a SQL parser in pure Python, with its test suite) with
a planted bug.

    prepare.py [--pristine] DIRECTORY

Downloads the release once (pip checks the hash, and so does this script on every run), unpacks it into DIRECTORY, which
is replaced, and applies planted-bug.patch unless --pristine is given. The download is kept in .cache/demo of the
checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache" / "demo"
NAME, VERSION = "sqlparse", "0.5.3"
SHA256 = "09f67787f56a0b16ecdbde1bfc7f5d9c3371ca683cfeaa8e6ff60b4807ec9272"
MAX_BYTES = 8 << 20


def download() -> Path:
    """The checked archive, from the cache or from the package index that pip is set up for."""
    archive = CACHE / f"{NAME}-{VERSION}.tar.gz"
    if archive.exists() and sha256(archive) == SHA256:
        return archive
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        requirements = Path(temporary, "requirements.txt")
        requirements.write_text(f"{NAME}=={VERSION} --hash=sha256:{SHA256}\n")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                NAME,
                "--require-hashes",
                "--requirement",
                str(requirements),
                "--dest",
                temporary,
            ],
            check=True,
        )
        Path(temporary, archive.name).replace(archive)
    if sha256(archive) != SHA256:
        raise SystemExit(
            f"{archive} is not the pinned release: its SHA-256 is {sha256(archive)}; delete it and try again"
        )
    return archive


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unpack(archive: Path, target: Path) -> None:
    """Write the archive's regular files below `target`, without the folder that all of them lie in."""
    written = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            if not member.isfile() or not parts or ".." in parts:
                continue
            content = tar.extractfile(member)
            written += member.size
            if content is None or written > MAX_BYTES:
                raise SystemExit(
                    f"{archive}: {member.name} cannot be unpacked, or there are more than {MAX_BYTES} bytes in it"
                )
            path = target.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
            path.chmod(0o755 if member.mode & 0o100 else 0o644)


def apply_patch(patch: Path, target: Path) -> None:
    """Apply a unified diff of one or more text files, strictly: every context line must be where the patch says it
    is."""
    lines = patch.read_text().splitlines(keepends=True)
    files: list[tuple[Path, list[str]]] = []
    at = shift = 0
    for line in lines:
        if line.startswith("+++ "):
            path = target.joinpath(*PurePosixPath(line[4:].strip()).parts[1:])
            files.append((path, path.read_text().splitlines(keepends=True)))
            shift = 0
        elif line.startswith("--- "):
            continue
        elif line.startswith("@@"):
            at = int(line.split()[1].lstrip("-").partition(",")[0]) - 1 + shift
        elif line.startswith("+"):
            files[-1][1].insert(at, line[1:])
            at, shift = at + 1, shift + 1
        elif files[-1][1][at] != line[1:]:
            raise SystemExit(
                f"{patch} does not fit {files[-1][0]}: line {at + 1} is {files[-1][1][at]!r}, not {line[1:]!r}"
            )
        elif line.startswith("-"):
            del files[-1][1][at]
            shift -= 1
        else:
            at += 1
    for path, content in files:
        path.write_text("".join(content))


def prepare(target: Path, *, pristine: bool) -> None:
    archive = download()
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    unpack(archive, target)
    if not pristine:
        apply_patch(HERE / "planted-bug.patch", target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's project.")
    parser.add_argument("--pristine", action="store_true", help="without the planted bug")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    prepare(options.directory, pristine=options.pristine)
    bug = "as released" if options.pristine else "with a planted bug"
    print(f"{NAME} {VERSION} {bug} in {options.directory}")


if __name__ == "__main__":
    main()
