"""User namespaces that cannot be made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.capabilities import require

_IN_A_CHROOT = """
import os, sys
from snapshotd.kernel.namespaces import user_namespace
from snapshotd.runtime.starting import main as starting
from snapshotd.types import IdMap

os.chroot(sys.argv[1])  # where the kernel allows none
{make}
"""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            "user_namespace(IdMap(100_000, 10))",
            "PermissionError: [Errno 1] a user namespace cannot be made: Operation not permitted",
        ),
        ("starting._own_user_namespace(200_000, 2, 0)", '{"refused": 1}'),
    ],
)
def test_why_one_cannot_be_made_is_said(make: str, said: str, tmp_path: Path) -> None:
    require("root")
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_CHROOT.format(make=make), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.splitlines()[-1].startswith(said)
