"""`pip install snapshotd` alone: what the built wheel asks for, and what that asks for in turn."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from snapshotd.engine.host.integrations import INTEGRATIONS
from tests.e2e.deployment import CHECKOUT, stage


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_the_package_alone_brings_no_framework(tmp_path: Path) -> None:
    stage(tmp_path)
    house = tmp_path / "wheelhouse"
    (own,) = house.glob("snapshotd-*.whl")
    with zipfile.ZipFile(own) as opened:
        (place,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        told = HeaderParser().parsestr(opened.read(place).decode())
    asked = told.get_all("Requires-Dist") or []
    always = {_name(one) for one in asked if "extra ==" not in one}
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    optional = {_name(one) for texts in extras.values() for one in texts} - {"cryptography", "snapshotd"}
    assert optional >= {one.package for one in INTEGRATIONS.values()}
    assert optional <= {_name(one) for one in asked if "extra ==" in one}
    assert always & optional == set()
    downloaded = {_name(path.name.partition("-")[0]) for path in house.glob("*.whl")}
    assert downloaded > always, "all that they need, too"
    assert downloaded & optional == set()
