"""A snapshot is written down in few places: its record in the engine, its row in the catalog, its record in the repository,
its record in the API, and the object that a user of the client holds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from snapshotd.api.record import forms_of
from snapshotd.api.snapshots import SnapshotInfo
from tests.own_sources import trees, walk

FIELDS = {
    *(
        "parent",
        "trajectory",
        "seq",
        "state",
        "created_at",
        "tags",
        "method",
        "messages",
        "follows",
        "warnings",
        "reused",
    ),
    *("files", "pause", "call", "tool", "stack", "image", "layers"),
}
"""Names of a snapshot's fields, without their units."""
MANY = 8
"""What says so many of them lists the fields of a snapshot."""


def listed(node: ast.AST) -> Iterator[str]:
    """The fields that a class declares, or the keys of a dictionary."""
    if isinstance(node, ast.ClassDef):
        yield from (x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name))
    if isinstance(node, ast.Dict):
        yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def test_few_places_list_the_fields_of_a_snapshot() -> None:
    found = [
        (file, type(node).__name__)
        for file, tree in trees().items()
        for node in walk(tree)
        if len(FIELDS & {name.removesuffix("_ns").removesuffix("_ms") for name in listed(node)}) >= MANY
    ]
    assert sorted(found) == [
        ("api/snapshots.py", "ClassDef"),
        ("cli/reference.py", "Dict"),  # the words of --json that no record describes alone
        ("engine/storage/records.py", "Dict"),  # the rows of the catalog are lists of columns
        ("integrations/mcp/answers.py", "ClassDef"),  # what a model reads of one
        ("types.py", "ClassDef"),
    ]


def test_the_record_of_a_snapshot_is_its_json() -> None:
    assert forms_of(SnapshotInfo) == {}
