"""The integrations that `doctor` lists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from snapshotd.engine.host import doctor, integrations
from snapshotd.engine.host.integrations import INTEGRATIONS, Integration, Trial
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
        assert (ROOT / f"{one.module.replace('.', '/')}.py").exists() or (ROOT / one.module.replace(".", "/")).is_dir()


def test_each_that_is_installed_works_here() -> None:
    found = {check.name.removeprefix("integration "): check for check in doctor._integrations()}
    assert found.keys() == INTEGRATIONS.keys()
    assert all(check.ok is True for check in found.values()), found
    working = {name for name, check in found.items() if " works: " in check.detail}
    assert working == {name for name, one in INTEGRATIONS.items() if one.version() is not None} >= {"langgraph", "mcp"}


def one(**more: object) -> Integration:
    return Integration(
        **{
            **dict.fromkeys(("extra", "package", "module", "purpose"), "none-such"),
            "least": (1,),
            "below": (2,),
            **more,
        }
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
    with pytest.raises(Unsupported, match=words) as raised, integrations.require("none-such"):
        pytest.fail("it was not refused")
    assert "pip install 'snapshotd[none-such]'" in raised.value.message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            ModuleNotFoundError("No module", name="deeper"),
            "the module deeper, which snapshotd[none-such] needs, is not",
        ),
        (ImportError("no name `x`", name="pytest"), "pytest cannot be imported: no name `x`: run"),
        (ImportError("no name `x`", name="snapshotd.client"), None),
    ],
)
def test_what_cannot_be_imported_is_one_sentence_where_it_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, fault: ImportError, words: str | None
) -> None:
    monkeypatch.setitem(INTEGRATIONS, "none-such", one(package="pytest", below=(99,)))
    for way, kind in ((integrations.require, Unsupported), (integrations.require_at_import, ImportError)):
        with pytest.raises(kind if words else ImportError) as raised, way("none-such"):
            raise fault
        if words is None:
            assert raised.value is fault
        else:
            assert words in str(raised.value)
            assert str(raised.value).endswith("run `pip install 'snapshotd[none-such]'`")
    outer, inner = integrations.require("none-such"), integrations.require_at_import("none-such")
    with pytest.raises(ImportError if words is None else Unsupported) as raised, outer, inner:
        raise fault
    assert str(raised.value).count("run `") == (0 if words is None else 1), "it is said once"


def test_one_that_is_not_installed_is_no_fault_and_a_broken_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_thing.py").write_text("raise ImportError('it needs more')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fits = {"package": "pytest", "below": (99,)}
    for name in list(INTEGRATIONS):
        monkeypatch.delitem(INTEGRATIONS, name)
    rows = (
        one(extra="missing"),
        one(extra="broken", module="broken_thing", **fits),
        one(extra="old", package="pytest"),
    )
    for row in rows:
        monkeypatch.setitem(INTEGRATIONS, row.extra, row)
    missing, broken, old = doctor._integrations()
    assert (missing.ok, missing.fix) == (True, "")
    assert "pip install 'snapshotd[missing]'" in missing.detail
    assert (broken.ok, "ImportError: it needs more" in broken.detail) == (None, True)
    assert broken.fix == "pip install 'snapshotd[broken]'"
    assert (old.ok, "1 or newer below 2 is needed" in old.detail) == (None, True)


def test_one_that_ends_without_a_word() -> None:
    assert Trial(one(module="sys; sys.exit(3)")).failure() == "it ended without a word"
    assert Trial(one(module="sys")).failure() is None
