"""A public class has a name of its own: who reads it knows which one is meant, and a search finds it."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

from tests.own_sources import trees

APART = ("agent/", "testing/")
"""Packages that the product does not import: the library in the sandbox has the user's words, the tests' provider is
no part of the product."""
API = "the API says a value of the engine in its own forms: times as text, sizes and paths for JSON"
CLIENT = "the client's users have the engine's words"
SHARED = {
    "ExperimentRequest": API,
    "ApprovalView": API,
    "CommandInfo": API,
    "DamagedOutput": API,
    "EditRequest": API,
    "ExecResult": CLIENT,
    "Experiment": CLIENT,
    "RewindPreview": API,
    "Sandbox": CLIENT,
    "SandboxInfo": API,
    "Snapshot": CLIENT,
}
"""Names that several packages share, and why."""


@cache
def public_classes() -> dict[str, list[str]]:
    """Name to the modules that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees().items():
        if not module.startswith(APART):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(module)
    return found


def test_public_classes_have_names_of_their_own() -> None:
    shared = {name: modules for name, modules in public_classes().items() if len(modules) > 1}
    assert {name: modules for name, modules in shared.items() if name not in SHARED} == {}
    assert {name for name in SHARED if name not in shared} == set(), "no exception any more"


def test_twins_are_of_the_api_or_the_client() -> None:
    """An exception does not let in a third class of the name."""
    for name in SHARED:
        modules = public_classes()[name]
        own = [m for m in modules if not m.startswith(("api/", "client/"))]
        assert len(own) <= 1, modules
        assert len(modules) - len(own) == 1, modules
