"""Records as each version wrote them, and what is read from them in the words of today. The files of a version never
change."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.base import SnapshotRow
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storing import records
from snapshotd.engine.storing.records import Record, Tags, decode, decode_any, encode, encode_tags
from snapshotd.errors import VersionMismatch

HERE = Path(__file__).parent / "records"
VERSIONS = range(1, records.VERSION + 1)


def golden(kind: str, version: int) -> bytes:
    return (HERE / f"{kind}-v{version}.json").read_bytes()


def again(record: Record | Tags) -> bytes:
    if isinstance(record, Tags):
        return encode_tags(record.tags, record.at_ns, record.unknown)
    return encode(
        record.snapshot,
        record.trajectory,
        record.image,
        record.messages,
        record.unknown,
        entries=record.entries,
        state=record.state,
    )


def shown(record: Record | Tags) -> Any:
    """Everything in a record, with what is not compared otherwise."""
    return json.loads(json.dumps(asdict(record)))


def test_there_is_one_for_every_version() -> None:
    assert {path.name for path in HERE.iterdir()} == {
        f"{kind}-v{version}{end}"
        for version in VERSIONS
        for kind in ("snapshot", "tags")
        for end in (".json", ".read.json")
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["snapshot", "tags"])
def test_it_is_read_as_it_was_meant(kind: str, version: int) -> None:
    data = golden(kind, version)
    assert json.loads(data)["version"] == version
    record = decode_any(data)
    meant = json.loads((HERE / f"{kind}-v{version}.read.json").read_text())
    if kind == "snapshot":
        meant["snapshot"]["warnings"] = []  # a later field, which these have not
        meant["snapshot"]["reused"] = None
        meant["trajectory"]["spec"]["limits"].setdefault("disk_bytes", 0)  # written only where somebody asked for it
        if meant["trajectory"]["agent"] is not None:
            meant["trajectory"]["agent"].setdefault("user", None)
        meant["snapshot"]["call"].setdefault("damaged", [])  # no version had such a call when these were written
    assert shown(record) == meant
    assert decode_any(again(record)) == record, "it can be written again, in the present version"
    if version == records.VERSION:
        assert again(record) == data, "to the byte"


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_fields_of_any_version_survive(version: int) -> None:
    document = json.loads(golden("snapshot", version))
    parts = [document["snapshot"], document["call"], document["trajectory"], document["messages"][0]]
    sections = [document, *parts, *document.get("entries", [])]
    for section in sections:
        section["zz-new"] = {"x": [1, {"y": "\ud800"}]}
    record = decode(json.dumps(document).encode())
    kept = json.loads(again(record))
    assert json.dumps(kept).count("zz-new") == len(sections)
    assert kept["snapshot"]["zz-new"] == kept["messages"][0]["zz-new"] == {"x": [1, {"y": "\ud800"}]}
    assert decode(again(record)) == record


@pytest.mark.parametrize("kind", ["snapshot", "tags"])
def test_a_version_that_is_not_known_is_refused_in_words(kind: str) -> None:
    document = {**json.loads(golden(kind, records.VERSION)), "version": records.VERSION + 1}
    with pytest.raises(VersionMismatch, match=f"version {records.VERSION + 1}.* newer snapshotd: use that"):
        decode_any(json.dumps(document).encode())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_catalog_takes_what_is_read(version: int) -> None:
    """Conversation, journal and state of any version live on."""
    record = decode(golden("snapshot", version))
    document = json.loads(golden("snapshot", version))
    document["start"] = 0
    document["snapshot"] |= {"parent": None, "follows": None, "base": None, "messages": len(record.messages)}
    document["trajectory"] |= {"forked_from": None, "began": None}
    record = decode(json.dumps(document).encode())
    catalog = SqliteCatalog(":memory:")
    try:
        catalog.restore_rows(
            [record.image],
            [record.trajectory],
            [SnapshotRow(record.snapshot, record.messages, None, record.entries, record.state)],
        )
        of = record.snapshot.id
        assert tuple(catalog.conversation(of)) == record.messages
        assert tuple(catalog.journal(of)) == record.entries
        assert catalog.state(of) == (record.state or {})
        assert bool(record.entries) is bool(record.state) is (version > 1)
        image = catalog.find_image(record.image.id)
        kept = records.encode_from(catalog, catalog.get_snapshot(of), image)
        assert decode(kept).entries == record.entries
        assert [entry.number for entry in decode(kept).entries] == [entry.number for entry in record.entries]
    finally:
        catalog.close()
