"""Records as an older snapshotd wrote them, and what is read from them in the words of today. The files never change."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.base import SnapshotRow
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storage import records
from snapshotd.engine.storage.records import Record, Tags, decode, decode_any, encode_tags
from snapshotd.errors import VersionMismatch
from tests.records import encoded

HERE = Path(__file__).parent / "records"


def golden(kind: str) -> bytes:
    return (HERE / f"{kind}-v{records.VERSION}.json").read_bytes()


def again(record: Record | Tags) -> bytes:
    if isinstance(record, Tags):
        return encode_tags(record.tags, record.at_ns, record.unknown)
    return encoded(record)


def shown(record: Record | Tags) -> Any:
    """Everything in a record, with what is not compared otherwise."""
    return json.loads(json.dumps(asdict(record)))


@pytest.mark.parametrize("kind", ["snapshot", "tags"])
def test_it_is_read_as_it_was_meant(kind: str) -> None:
    data = golden(kind)
    record = decode_any(data)
    meant = json.loads((HERE / f"{kind}-v{records.VERSION}.read.json").read_text())
    if kind == "snapshot":
        meant["snapshot"] |= {"warnings": [], "reused": None, "refused": []}  # later fields, which these have not
        meant["trajectory"]["spec"]["limits"].setdefault("disk_bytes", 0)  # written only where somebody asked for it
        meant["trajectory"]["spec"]["network"] = {"kind": meant["trajectory"]["spec"]["network"], "rules": []}
        meant["trajectory"]["agent"].setdefault("user", None)
        meant["snapshot"]["call"].setdefault("damaged", [])
    assert shown(record) == meant
    assert again(record) == data, "to the byte"


def test_unknown_fields_survive() -> None:
    document = json.loads(golden("snapshot"))
    parts = [document["snapshot"], document["call"], document["trajectory"], document["messages"][0]]
    sections = [document, *parts, *document["entries"]]
    for section in sections:
        section["zz-new"] = {"x": [1, {"y": "\ud800"}]}
    record = decode(json.dumps(document).encode())
    kept = json.loads(again(record))
    assert json.dumps(kept).count("zz-new") == len(sections)
    assert kept["snapshot"]["zz-new"] == kept["messages"][0]["zz-new"] == {"x": [1, {"y": "\ud800"}]}
    assert decode(again(record)) == record


@pytest.mark.parametrize("kind", ["snapshot", "tags"])
@pytest.mark.parametrize(("change", "said"), [(1, "a newer"), (-1, "an older")])
def test_another_version_is_refused_in_words(kind: str, change: int, said: str) -> None:
    document = {**json.loads(golden(kind)), "version": records.VERSION + change}
    with pytest.raises(VersionMismatch, match=f"by {said} snapshotd .format {records.VERSION + change}, .* use that"):
        decode_any(json.dumps(document).encode())


def test_a_catalog_takes_what_is_read() -> None:
    """Conversation, journal and state live on."""
    record = decode(golden("snapshot"))
    document = json.loads(golden("snapshot"))
    document["start"] = 0
    document["snapshot"] |= {"parent": None, "follows": None, "base": None, "messages": len(record.messages)}
    document["trajectory"] |= {"forked_from": None, "began": None}
    record = decode(json.dumps(document).encode())
    catalog = SqliteCatalog(":memory:")
    try:
        catalog.others.restore(
            [record.image],
            [record.trajectory],
            [SnapshotRow(record.snapshot, record.messages, None, record.entries, record.state)],
        )
        of = record.snapshot.id
        assert tuple(catalog.conversations.read(of)) == record.messages
        assert tuple(catalog.journal.read(of)) == record.entries
        assert catalog.conversations.state(of) == (record.state or {})
        assert record.entries
        assert record.state
        image = catalog.images.find(record.image.id)
        kept = records.encode_from(catalog, catalog.snapshots.get(of), image)
        assert decode(kept).entries == record.entries
        assert [entry.number for entry in decode(kept).entries] == [entry.number for entry in record.entries]
    finally:
        catalog.close()
