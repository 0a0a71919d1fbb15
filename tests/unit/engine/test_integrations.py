"""The integrations that `doctor` lists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from snapshotd.engine.host import doctor, integrations
from snapshotd.engine.host.integrations import INTEGRATIONS, Integration
from snapshotd.errors import Unsupported

ROOT = Path(__file__).parents[3]


def test_the_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, one in INTEGRATIONS.items():
        (wanted,) = [text for text in extras[name] if re.match(r"[\w-]+", text)[0] == one.package]  # type: ignore[index]
        least, below = (".".join(map(str, numbers)) for numbers in (one.least, one.below))
        assert wanted == f"{one.package}>={least},<{below}"
        if name == "ray":
            continue  # a part of docs/fleet.md and of snapshotd/client/fleet
        assert (ROOT / "docs" / "integrations" / f"{name}.md").exists()
        assert (ROOT / "snapshotd" / "integrations" / name.replace("-", "_") / "__init__.py").exists()


def test_each_that_is_installed_fits_here() -> None:
    found = {check.name.removeprefix("integration "): check for check in doctor._integrations()}
    assert found.keys() == INTEGRATIONS.keys()
    assert all(check.ok is True for check in found.values()), found
    working = {name for name, check in found.items() if " fits: " in check.detail}
    assert working == {name for name, one in INTEGRATIONS.items() if one.version() is not None} >= {"langgraph", "mcp"}


def one(**more: object) -> Integration:
    return Integration(
        **{**dict.fromkeys(("extra", "package", "purpose"), "none-such"), "least": (1,), "below": (2,), **more}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "none-such is not installed"),
        ({"package": "pytest", "least": (99,), "below": (100,)}, "99 or newer below 100"),
        ({"package": "pytest", "least": (1,), "below": (2,)}, "1 or newer below 2"),
    ],
)
def test_what_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, more: dict[str, object], words: str) -> None:
    monkeypatch.setitem(INTEGRATIONS, "none-such", one(**more))
    with pytest.raises(Unsupported, match=words) as raised:
        integrations.require("none-such")
    assert "pip install 'snapshotd[none-such]'" in raised.value.message


def test_one_that_is_not_installed_is_no_fault_and_a_broken_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs = "Requires-Dist: pytest>=8\nRequires-Dist: none-such ; extra == 'more'\nRequires-Dist: part\n"
    for name, lines in {"whole": needs, "part": "Requires-Dist: whole[all]>1\nRequires-Dist: nowhere~=3\n"}.items():
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n{lines}")
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(INTEGRATIONS):
        monkeypatch.delitem(INTEGRATIONS, name)
    rows = (one(extra="missing"), one(extra="broken", package="whole"), one(extra="old", package="pytest"))
    for row in rows:
        monkeypatch.setitem(INTEGRATIONS, row.extra, row)
    missing, broken, old = doctor._integrations()
    assert (missing.ok, missing.fix) == (True, "")
    assert "pip install 'snapshotd[missing]'" in missing.detail
    assert (broken.ok, "whole needs nowhere, which is not installed" in broken.detail) == (None, True)
    assert broken.fix == "pip install 'snapshotd[broken]'"
    assert (old.ok, "1 or newer below 2 is needed" in old.detail) == (None, True)
