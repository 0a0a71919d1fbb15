"""Each right that a process can lack is found by the probes, by its own name, and no mode is left that would need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.daemon.host import Footing, choose_mode
from snapshotd.errors import Unsupported
from snapshotd.kernel import abilities
from snapshotd.kernel.abilities import Abilities
from snapshotd.kernel.probes import needed

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to take something away")


def probe(place: Path, *without: str) -> Abilities:
    """The abilities of a root that has not these capabilities."""
    dropped = ",".join(f"-{name}" for name in without)
    command = ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"] if without else []
    command += [sys.executable, "-m", needed.__name__, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(needed.__file__).parents[3])
    return needed._of(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("capability", "ability", "reason"),
    [
        ("sys_admin", "mounts", "Operation not permitted"),
        ("sys_ptrace", "looks", "Permission denied"),
        ("sys_nice", "priorities", "Permission denied"),
    ],
)
def test_without_a_capability(tmp_path: Path, capability: str, ability: str, reason: str) -> None:
    whole = probe(tmp_path)
    assert ability not in whole.reasons
    found = probe(tmp_path, capability)
    assert reason in found.reasons[ability]
    assert not getattr(found, ability)
    assert found.modes() == ()
    with pytest.raises(Unsupported, match=f"{ability}: .*{reason}.*snapshotd doctor"):
        choose_mode(found, Footing())
    (told,) = (one for one in abilities.ABILITIES if one.field == ability)
    assert capability.upper() in told.fix
    assert list(tmp_path.iterdir()) == []


def test_a_place_on_an_overlay(tmp_path: Path) -> None:
    """As a container's own root is: without a loop device, no layer can lie there."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", tmp_path / "merged"], check=True)
    try:
        found = probe(tmp_path / "merged")
    finally:
        subprocess.run(["umount", tmp_path / "merged"], check=True)
    assert (found.overlays, found.modes()) == (False, ())
    with pytest.raises(Unsupported, match=r"overlays: .*Invalid argument"):
        choose_mode(found, Footing())
    (told,) = (one for one in abilities.ABILITIES if one.field == "overlays")
    assert "not on an overlay or a network file system" in told.fix
