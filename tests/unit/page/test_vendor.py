"""The vendored files are the ones that their licences name."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from snapshotd.page.api_types import declare_types

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "snapshotd" / "page" / "static"


def test_each_has_a_licence_and_its_hash() -> None:
    text = (STATIC / "vendor" / "LICENSES.txt").read_text()
    named = dict(re.findall(r"^(\S+): sha256 ([0-9a-f]{64})$", text, re.MULTILINE))
    found = {path.name: path for path in (STATIC / "vendor").iterdir() if path.suffix in (".mjs", ".css")}
    assert named == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def test_the_types_of_the_api_are_those_of_its_description() -> None:
    description = json.loads((ROOT / "docs" / "openapi.json").read_text())
    assert (STATIC / "records.d.ts").read_text() == declare_types(description), "run `make docs`"
