"""The bytes of trees: every tree comes back, everything else is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.repo.base import Tree, TreeEntry
from snapshotd.repo.format.tree import BadTree, decode_tree, encode_tree
from snapshotd.types import BlobID, Kind, TreeID
from tests import long

U16, U32, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
IDS = st.binary(min_size=32, max_size=32).map(bytes.hex)
TIMES = st.one_of(
    st.integers(0, 1 << 62),
    st.integers(-(1 << 63) * 10**9, ((1 << 63) - 1) * 10**9),
    st.sampled_from([-1, 0, 1, U32 * 10**9, U32 * 10**9 + 999_999_999, (U32 + 1) * 10**9]),
)
NAMES = st.binary(min_size=1, max_size=255).filter(
    lambda name: name not in (b".", b"..") and b"/" not in name and b"\0" not in name
)
XATTRS = st.dictionaries(st.binary(min_size=1, max_size=20), st.binary(max_size=200), max_size=3).map(
    lambda d: tuple(sorted(d.items()))
)
SIZES = st.one_of(st.integers(0, 1000), st.sampled_from([U32, U32 + 1, U64]))


@st.composite
def entries(draw: st.DrawFn, name: bytes) -> TreeEntry:
    kind = draw(st.sampled_from(Kind))
    if kind is Kind.DIRECTORY:
        return TreeEntry(name, kind, 0, 0, 0, 0, tree=TreeID(draw(IDS)))
    link, nlink = draw(st.one_of(st.just((0, 1)), st.tuples(st.integers(0, U64), st.integers(1, U32))))
    owner = draw(st.sampled_from([(0o644, 0, 0), (0o7777, U32, U32), (0o755, 1000, 1000), (0, 5, 6)]))
    fields: dict[str, object] = {"link": link, "nlink": nlink, "xattrs": draw(XATTRS)}
    if kind is Kind.FILE:
        fields["size"] = size = draw(SIZES)
        fields["content"] = draw(st.one_of(st.none(), IDS.map(BlobID)))
        if draw(st.booleans()):
            ends = sorted(draw(st.sets(st.integers(0, min(size, 10_000)), max_size=8)))
            fields["extents"] = tuple((a, b - a) for a, b in zip(ends[::2], ends[1::2], strict=False))
    elif kind is Kind.SYMLINK:
        fields["target"] = draw(st.binary(min_size=1, max_size=300).filter(lambda target: b"\0" not in target))
    elif kind in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE):
        fields["rdev"] = draw(st.integers(0, U64))
    return TreeEntry(name, kind, *owner, draw(TIMES), **fields)  # type: ignore[arg-type]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    own = TreeEntry(b"", Kind.DIRECTORY, draw(st.integers(0, 0o7777)), 0, 0, draw(TIMES), xattrs=draw(XATTRS))
    names = sorted(draw(st.sets(NAMES, max_size=12)))
    return Tree(own, tuple(draw(entries(name)) for name in names))


@settings(max_examples=long.size(50, 1500), deadline=None)
@given(trees())
def test_every_tree_comes_back(tree: Tree) -> None:
    assert decode_tree(encode_tree(tree)) == tree


@settings(max_examples=long.size(100, 3000), deadline=None)
@given(trees(), st.integers(0, 1 << 30), st.sampled_from(["flip", "cut", "drop", "add"]), st.integers(1, 255))
def test_other_bytes_are_refused_or_are_another_tree(tree: Tree, where: int, how: str, amount: int) -> None:
    """Strict: whatever decodes encodes to the same bytes, so no two encodings share a meaning and nothing trails."""
    data = encode_tree(tree)
    at = where % len(data)
    bad = {
        "flip": data[:at] + bytes((data[at] ^ amount,)) + data[at + 1 :],
        "cut": data[:at],
        "drop": data[:at] + data[at + amount :],
        "add": data[:at] + bytes(amount) + data[at:],
    }[how]
    try:
        decoded = decode_tree(bad)
    except BadTree:
        return
    assert encode_tree(decoded) == bad
    assert decoded != tree or bad == data


@settings(max_examples=long.size(50, 300), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_are_a_tree(data: bytes) -> None:
    try:
        decoded = decode_tree(b"\x01" + data)
    except BadTree:
        return
    assert encode_tree(decoded) == b"\x01" + data


def test_a_few_bytes_cannot_declare_much() -> None:
    """Counts are checked against the length before anything is made of them."""
    for data in (
        b"",
        b"\x02",
        b"\x01\xff\xff\xff\xff\x7f",
        b"\x01\xff\xff\x7f\xff\xff\x7f",
        b"\x01\x80\x00",
        b"\x01\x00\x01",
    ):
        with pytest.raises(BadTree):
            decode_tree(data)


OWN = TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 0)


@pytest.mark.parametrize(
    "entry",
    [
        TreeEntry(b"f", Kind.FILE, 0o10644, 0, 0, 0),
        TreeEntry(b"f", Kind.FILE, 0o644, -1, 0, 0),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 1 << 32, 0),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 1 << 100),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, -1),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, 1 << 64),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, 10, None, ((5, 6),)),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, 10, None, ((5, 1), (5, 1))),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, 10, None, ((5, 0),)),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, target=b"x"),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, rdev=1),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, link=1 << 64),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, nlink=0),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, xattrs=((b"b", b""), (b"a", b""))),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, tree=TreeID("0" * 64)),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, content=BlobID("zz")),
        TreeEntry(b"f", Kind.FILE, 0o644, 0, 0, 0, content=BlobID("00")),
        TreeEntry(b"f", Kind.SYMLINK, 0o777, 0, 0, 0),
        TreeEntry(b"f", Kind.SYMLINK, 0o777, 0, 0, 0, target=b"a\0"),
        TreeEntry(b"f", Kind.SYMLINK, 0o777, 0, 0, 0, 5, target=b"a"),
        TreeEntry(b"f", Kind.FIFO, 0o644, 0, 0, 0, content=BlobID("0" * 64)),
        TreeEntry(b"f", Kind.DIRECTORY, 0o755, 0, 0, 0, tree=TreeID("0" * 64)),
        TreeEntry(b"f" * 256, Kind.FIFO, 0o644, 0, 0, 0),
    ],
    ids=repr,
)
def test_malformed_entries_are_refused(entry: TreeEntry) -> None:
    with pytest.raises(ValueError):
        encode_tree(Tree(OWN, (entry,)))


def test_an_edit_changes_few_bytes_of_a_large_directory() -> None:
    """What deltas live on: the rows and ids of the others stay as they are."""
    rng = random.Random(1)

    def row(number: int, size: int) -> TreeEntry:
        return TreeEntry(
            b"file%04d" % number, Kind.FILE, 0o644, 0, 0, rng.randrange(1 << 60), size, BlobID(rng.randbytes(32).hex())
        )

    rows = [row(number, 5) for number in range(1000)]
    before = encode_tree(Tree(OWN, tuple(rows)))
    rows[500] = row(500, 6)
    after = encode_tree(Tree(OWN, tuple(rows)))
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 44
