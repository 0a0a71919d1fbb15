"""A public class has a name of its own: who reads it knows which one is meant, and a search finds it."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

from tests.own_sources import trees

APART = ("agent/", "testing/")
"""Packages that the product does not import: the library in the sandbox has the user's words, the tests' provider is
no part of the product."""
WIRE = "a wire model has the name of the record that it shows"
CLIENT = "the client's users have the engine's words"
SHARED = {
    "AlignedCall": f"{WIRE}; {CLIENT}",
    "Approval": WIRE,
    "ApprovalView": f"{WIRE}; {CLIENT}",
    "BisectRequest": WIRE,
    "Command": f"{WIRE}; {CLIENT}",
    "CommandInfo": CLIENT,
    "ComparedBranch": WIRE,
    "ComparedPair": WIRE,
    "Comparison": WIRE,
    "DamagedOutput": f"{WIRE}; {CLIENT}",
    "EditRequest": WIRE,
    "Effect": WIRE,
    "ExecResult": CLIENT,
    "Experiment": f"{WIRE}; {CLIENT}",
    "ExperimentBranch": WIRE,
    "ExperimentRequest": WIRE,
    "Experiments": "each is the part about experiments: of the engine and of its client",
    "FileCounts": "the client's record has the name of the wire model",
    "FileStatus": f"{WIRE}; {CLIENT}",
    "Image": WIRE,
    "Limits": WIRE,
    "Message": WIRE,
    "Mind": "each is the part about the mind of a class with many methods: the engine and its client",
    "Policy": f"{WIRE}; {CLIENT}",
    "Provider": CLIENT,
    "PrunedSnapshot": WIRE,
    "RewindPreview": f"{WIRE}; {CLIENT}",
    "Sandbox": f"{WIRE}; {CLIENT}",
    "SandboxInfo": CLIENT,
    "ScoreRequest": WIRE,
    "Snapshot": f"{WIRE}; {CLIENT}",
    "StoredValue": WIRE,
    "Task": WIRE,
    "Tool": f"{WIRE}; {CLIENT}",
    "Trajectory": WIRE,
    "Tried": CLIENT,
    "Usage": WIRE,
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


def test_twins_are_wire_models_or_the_clients() -> None:
    """An exception does not let in a third class of the name."""
    for name in SHARED:
        modules = public_classes()[name]
        own = [m for m in modules if not m.startswith(("daemon/http/models", "client/"))]
        assert len(own) <= 1, modules
        assert len(modules) - len(own) <= 2, modules
