"""The image that is made of the machine's own programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotd.errors import Unsupported
from snapshotd.images import machine


def test_a_program_that_does_not_end_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "ldd"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_PATH", f"{tmp_path}:{machine._PATH}")
    monkeypatch.setattr(machine, "_TIMEOUT_S", 0.2)
    with pytest.raises(Unsupported, match="`ldd` has not ended"):
        machine._libraries(["/bin/sh"])
