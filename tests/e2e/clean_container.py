"""A container that has Debian's packages and the wheels of this checkout, and nothing else of this machine: no checkout,
no daemon, no network."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.e2e import deployment

TIMEOUT_S = 600
_ENTER = """
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs run run
mkdir -p old cache
mount --bind "$2" cache
pivot_root . old
umount -l old
exec bash --noprofile --norc -eo pipefail -c "$3"
"""
"""Not chroot: the kernel makes no user namespaces in one, and so no sandboxes."""


class CleanContainer:
    """`root` is its root directory on the host; `cache` a folder of the host that it has as /cache. Its programs have
    namespaces of their own. What still runs when a script ends is killed."""

    def __init__(self, root: Path, cache: Path) -> None:
        """Unpacks Debian's packages into `root`, which is empty, and puts the wheels there, at /wheelhouse."""
        self.root, self.cache = root, cache
        subprocess.run(["tar", "-C", root, "--numeric-owner", "-xf", deployment.base_archive()], check=True)
        context = root / "context"
        context.mkdir()
        deployment.stage(context)
        (context / "wheelhouse").rename(root / "wheelhouse")
        shutil.rmtree(context)

    @property
    def state_dir(self) -> Path:
        return self.root / "var/lib/snapshotd"

    def bash(self, script: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a script as its first process, with these variables alone."""
        own = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
        return subprocess.run(
            [*own, "bash", "-ec", _ENTER, "enter", str(self.root), str(self.cache), script],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
