"""What a machine can do is asked in one place (kernel/probes), by doing it: nothing else asks for a kernel's version,
for root, or names overlayfs's marks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "snapshotd"
ABILITIES = {"kernel/abilities.py", "kernel/probes/needed.py", "kernel/rootless.py"}
QUESTIONS: dict[str, set[str]] = {
    r"trusted\.overlay": set(),
    r"os\.uname|platform\.(release|version)\(": set(),
    r"get(e|res)?uid\(\) *[!=]= *0|(if|if not|and|or) os\.gete?uid\(\)": {
        "engine/host/system_packages.py",  # a program of one file for any Python
        "client/apply/host_change.py",  # only root can give files away; clients know nothing of the kernel
    },
    r"uid_map": {
        "kernel/namespaces.py",  # writes them
        "runtime/_checks.py",  # reads a container's
    },
    r"apparmor_restrict|unprivileged_userns": set(),
}
"""Pattern to the files that may have it besides, with the reason."""


@pytest.mark.parametrize("pattern", QUESTIONS)
def test_only_the_abilities_ask(pattern: str) -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(pattern, path.read_text()) and "agent" not in path.relative_to(ROOT).parts[:1]
    }
    assert found - ABILITIES - QUESTIONS[pattern] == set()
