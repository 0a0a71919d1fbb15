"""What the engine should hold, kept in dictionaries: trees of /workspace, trajectories, snapshots, tags, what a prune
may take.

`plan` makes a shell script of random file operations and the tree that it leads to. Overlay semantics are part of it: a
name of a hard link group that an earlier layer holds is torn from its group when it is written.
"""

from __future__ import annotations

import itertools
import os
import random
import shlex
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from snapshotd.client import Policy

_inodes = itertools.count(1)
_NAMES = (
    "a",
    "b",
    "c",
    "d",
    "e",
    "long name with spaces",
    "quote'\"",
    "new\nline",
    "ünïcode",
    "-dash",
    ".hidden",
    "x" * 180,
)
_FILE_MODES = (0o644, 0o600, 0o755, 0o400, 0o444)
_DIR_MODES = (0o755, 0o700, 0o1777, 0o711)
MAX_ENTRIES = 60

Listing = dict[str, tuple[Any, ...]]
"""Path below /workspace to (kind, mode, uid, gid, content or target, names of its link group)."""


@dataclass(frozen=True, slots=True)
class Node:
    kind: str
    """`d`, `f`, `l` or `p`."""
    mode: int
    data: bytes = b""
    uid: int = 0
    gid: int = 0


@dataclass(slots=True)
class Tree:
    """Names to inode numbers to nodes; names of one number are hard links."""

    names: dict[str, int] = field(default_factory=dict)
    nodes: dict[int, Node] = field(default_factory=dict)

    def copy(self) -> Tree:
        return Tree(dict(self.names), dict(self.nodes))

    def node(self, path: str) -> Node:
        return self.nodes[self.names[path]]

    def listing(self) -> Listing:
        groups: dict[int, list[str]] = {}
        for path, inode in self.names.items():
            groups.setdefault(inode, []).append(path)
        found: Listing = {}
        for path, inode in self.names.items():
            n = self.nodes[inode]
            links = tuple(sorted(groups[inode])) if n.kind == "f" and len(groups[inode]) > 1 else ()
            found[path] = (n.kind, 0 if n.kind == "l" else n.mode, n.uid, n.gid, n.data, links)
        return found


def host_listing(root: Path) -> tuple[Listing, dict[str, int]]:
    """The same of a directory of this machine, and the modification times in ns."""
    found: Listing = {}
    times: dict[str, int] = {}
    groups: dict[int, list[str]] = {}
    for base, dirs, names in os.walk(root):
        for name in dirs + names:
            full = os.path.join(base, name)
            path = os.path.relpath(full, root)
            st = os.lstat(full)
            kind, data = _content(full, st)
            found[path] = (kind, 0 if kind == "l" else stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, data, ())
            times[path] = st.st_mtime_ns
            if kind == "f" and st.st_nlink > 1:
                groups.setdefault(st.st_ino, []).append(path)
    for group in groups.values():
        for path in group:
            found[path] = (*found[path][:5], tuple(sorted(group)))
    return found, times


def _content(full: str, st: os.stat_result) -> tuple[str, bytes]:
    if stat.S_ISDIR(st.st_mode):
        return "d", b""
    if stat.S_ISLNK(st.st_mode):
        return "l", os.fsencode(os.readlink(full))
    if stat.S_ISFIFO(st.st_mode):
        return "p", b""
    return "f", Path(full).read_bytes()


def changes(a: Listing, b: Listing) -> set[tuple[str, str]]:
    """What `diff` should say: (change, path)."""
    found = {("deleted", path) for path in a.keys() - b.keys()} | {("added", path) for path in b.keys() - a.keys()}
    return found | {("changed", path) for path in a.keys() & b.keys() if a[path][:5] != b[path][:5]}


class _NotNow(Exception):  # noqa: N818 - no error
    """The operation makes no sense on this tree."""


class Script:
    """A random shell script for one tool call, and the tree it makes. `upper`: inodes that lie in the sandbox's live
    layer. `owners`: those that files may be given to."""

    def __init__(
        self, rng: random.Random, tree: Tree, upper: set[int], owners: tuple[int, ...] = (0, 1000, 65534)
    ) -> None:
        self.rng, self.tree, self.upper, self.owners = rng, tree.copy(), set(upper), owners
        self.lines: list[str] = ["set -e"]
        self._torn: set[int] = set()
        self._operations: tuple[tuple[int, Callable[[], str]], ...] = (
            (8, self._write),
            (6, self._append),
            (2, self._sequence),
            (2, self._poke),
            (1, self._hole),
            (4, self._mkdir),
            (5, self._move),
            (4, self._remove),
            (3, self._link),
            (2, self._symlink),
            (3, self._chmod),
            (1, self._chown),
            (1, self._fifo),
            (2, self._again),
            (1, self._file_for_directory),
            (1, self._directory_for_file),
        )

    def grow(self, count: int) -> None:
        """Add up to `count` operations."""
        weights = [weight for weight, _ in self._operations]
        for _ in range(count):
            ((_, operation),) = self.rng.choices(self._operations, weights)
            before, torn, upper = self.tree.copy(), set(self._torn), set(self.upper)
            try:
                self.lines.append(operation())
            except _NotNow:
                self.tree, self._torn, self.upper = before, torn, upper
        used = set(self.tree.names.values())
        self.tree.nodes = {inode: node for inode, node in self.tree.nodes.items() if inode in used}

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def edit(self, count: int) -> dict[str, bytes | None]:
        """Add up to `count` edits instead, as `Snapshotd.edit` takes them: paths, and their content or None. They come
        in order."""
        edits: dict[str, bytes | None] = {}
        for _ in range(count):
            try:
                path, content = self.rng.choice((self._edit_new, self._edit_content, self._edit_away))(edits)
            except _NotNow:
                continue
            edits[path] = content
        return edits

    def _edit_new(self, edits: dict[str, bytes | None]) -> tuple[str, bytes | None]:
        path, data = self._unedited(self._fresh(), edits), self._text().encode()
        self._add(path, Node("f", 0o644, data))
        return path, data

    def _edit_content(self, edits: dict[str, bytes | None]) -> tuple[str, bytes | None]:
        path, data = self._unedited(self._pick("f"), edits), self._text().encode()
        self._change(path, data=data)
        return path, data

    def _edit_away(self, edits: dict[str, bytes | None]) -> tuple[str, bytes | None]:
        path = self._unedited(self._pick("d", "f", "l", "p"), edits)
        for each in [path, *self._below(path)]:
            del self.tree.names[each]
        return path, None

    def _unedited(self, path: str, edits: dict[str, bytes | None]) -> str:
        if path in edits:
            raise _NotNow
        return path

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _pick(self, *kinds: str) -> str:
        found = sorted(path for path in self.tree.names if self.tree.node(path).kind in kinds)
        if not found:
            raise _NotNow
        return self.rng.choice(found)

    def _directory(self) -> str:
        return self.rng.choice(
            ["", *sorted(p for p in self.tree.names if self.tree.node(p).kind == "d" and p.count("/") < 5)]
        )

    def _fresh(self) -> str:
        """A path that is free, in a directory that is there."""
        path = os.path.join(self._directory(), self.rng.choice(_NAMES))
        if path in self.tree.names or len(self.tree.names) >= MAX_ENTRIES:
            raise _NotNow
        return path

    def _text(self) -> str:
        return f"<{self.rng.getrandbits(60):x}>" * self.rng.choice((1, 1, 3, 40))

    # -- changing the tree ---------------------------------------------------------------------------------------------

    def _add(self, path: str, node: Node) -> None:
        inode = next(_inodes)
        self.tree.names[path], self.tree.nodes[inode] = inode, node
        self.upper.add(inode)

    def _touch(self, path: str) -> int:
        """Copy up: the name leaves its link group, unless the group is in the live layer. One name of a group per
        script: what becomes of two depends on which groups the engine has found out so far."""
        inode = self.tree.names[path]
        if inode in self.upper:
            return inode
        if inode in self._torn:
            raise _NotNow
        self._torn.add(inode)
        own = next(_inodes)
        self.tree.names[path], self.tree.nodes[own] = own, self.tree.nodes[inode]
        self.upper.add(own)
        return own

    def _change(self, path: str, **fields: Any) -> None:
        inode = self._touch(path)
        self.tree.nodes[inode] = replace(self.tree.nodes[inode], **fields)

    def _below(self, path: str) -> list[str]:
        return [each for each in self.tree.names if each.startswith(path + "/")]

    # -- operations: each returns its line -----------------------------------------------------------------------------

    def _write(self) -> str:
        text = self._text()
        if self.rng.random() < 0.4:
            path = self._pick("f")
            self._change(path, data=text.encode())
        else:
            path = self._fresh()
            self._add(path, Node("f", 0o644, text.encode()))
        return f"printf %s {_q(text)} > {_p(path)}"

    def _append(self) -> str:
        path, text = self._pick("f"), self._text()
        self._change(path, data=self.tree.node(path).data + text.encode())
        return f"printf %s {_q(text)} >> {_p(path)}"

    def _sequence(self) -> str:
        path, first = self._fresh(), self.rng.randrange(100)
        last = first + self.rng.choice((100, 5000, 5000, 120_000))
        self._add(path, Node("f", 0o644, "".join(f"{n}\n" for n in range(first, last + 1)).encode()))
        return f"seq {first} {last} > {_p(path)}"

    def _poke(self) -> str:
        path, text = self._pick("f"), self._text()[:20]
        data = self.tree.node(path).data
        at = self.rng.randrange(len(data) + 1)
        self._change(path, data=data[:at] + text.encode() + data[at + len(text) :])
        return f"printf %s {_q(text)} | dd of={_p(path)} bs=1 seek={at} conv=notrunc 2>/dev/null"

    def _hole(self) -> str:
        path = self._pick("f")
        data = self.tree.node(path).data
        size = len(data) + self.rng.choice((1, 5000, 100_000))
        if size > 2_000_000:
            raise _NotNow
        self._change(path, data=data + bytes(size - len(data)))
        return f"dd if=/dev/null of={_p(path)} bs=1 count=0 seek={size} 2>/dev/null"

    def _mkdir(self) -> str:
        path = self._fresh()
        self._add(path, Node("d", 0o755))
        return f"mkdir {_p(path)}"

    def _move(self) -> str:
        source = self._pick("d", "d", "f", "l", "p")
        target = self._fresh()
        if self.rng.random() < 0.2 and self.tree.node(source).kind == "f":
            target = self._pick("f")
        if (
            target == source
            or target.startswith(source + "/")
            or self.tree.names.get(target) == self.tree.names[source]
        ):
            raise _NotNow
        if self.tree.node(source).kind != "d":
            self._touch(source)
        for path in [source, *self._below(source)]:
            self.tree.names[target + path[len(source) :]] = self.tree.names.pop(path)
        return f"mv -f {_p(source)} {_p(target)}"

    def _remove(self) -> str:
        path = self._pick("d", "f", "f", "l", "p")
        for each in [path, *self._below(path)]:
            del self.tree.names[each]
        return f"rm -rf {_p(path)}"

    def _link(self) -> str:
        source, target = self._pick("f"), self._fresh()
        self.tree.names[target] = self._touch(source)
        return f"ln {_p(source)} {_p(target)}"

    def _symlink(self) -> str:
        path, target = self._fresh(), self.rng.choice(("a", "../b", "/etc/passwd", "nowhere"))
        self._add(path, Node("l", 0, target.encode()))
        return f"ln -s {_q(target)} {_p(path)}"

    def _chmod(self) -> str:
        path = self._pick("f", "d")
        mode = self.rng.choice(_DIR_MODES if self.tree.node(path).kind == "d" else _FILE_MODES)
        self._change(path, mode=mode)
        return f"chmod {mode:o} {_p(path)}"

    def _chown(self) -> str:
        path, owner = self._pick("f", "d"), self.rng.choice(self.owners)
        self._change(path, uid=owner, gid=owner)
        return f"chown {owner}:{owner} {_p(path)}"

    def _fifo(self) -> str:
        path = self._fresh()
        self._add(path, Node("p", 0o644))
        return f"mknod {_p(path)} p"

    def _again(self) -> str:
        """A directory is removed and made again: what was below must not shine through."""
        path, text = self._pick("d"), self._text()
        for each in [path, *self._below(path)]:
            del self.tree.names[each]
        self._add(path, Node("d", 0o755))
        self._add(f"{path}/a", Node("f", 0o644, text.encode()))
        return f"rm -rf {_p(path)}; mkdir {_p(path)}; printf %s {_q(text)} > {_p(path + '/a')}"

    def _file_for_directory(self) -> str:
        path, text = self._pick("d"), self._text()
        for each in [path, *self._below(path)]:
            del self.tree.names[each]
        self._add(path, Node("f", 0o644, text.encode()))
        return f"rm -rf {_p(path)}; printf %s {_q(text)} > {_p(path)}"

    def _directory_for_file(self) -> str:
        path = self._pick("f", "l")
        del self.tree.names[path]
        self._add(path, Node("d", 0o755))
        self._add(f"{path}/b", Node("f", 0o644))
        return f"rm -f {_p(path)}; mkdir {_p(path)}; : > {_p(path + '/b')}"


def _q(text: str) -> str:
    return shlex.quote(text)


def _p(path: str) -> str:
    return _q("./" + path)


INSIDE = r"""
use strict; binmode STDOUT;
sub walk { my ($path) = @_;
    opendir(my $d, $path) or die "$path: $!";
    $! = 0; my @names = sort grep { $_ ne '.' && $_ ne '..' } readdir $d; die "$path: $!" if $!;
    for my $name (@names) {
        my $full = "$path/$name"; my @st = lstat $full or die "$full: $!"; my $sum = 0;
        if (-l _) { $sum = unpack('%32C*', readlink $full) }
        elsif (-f _) {
            open(my $f, '<', $full) or die "$full: $!";
            local $/; $! = 0; my $all = <$f> // ''; die "$full: $!" if $!;
            $sum = unpack('%32C*', $all);
        }
        my $type = -l _ ? 'l' : -d _ ? 'd' : -p _ ? 'p' : 'f';
        @st = lstat $full;
        print join("\0", substr($full, 2), $type, $st[2] & 07777, $st[4], $st[5], $st[7], $sum), "\0\0";
        walk($full) if $type eq 'd';
    }
}
walk('.');
"""
"""Prints the tree as a process in the sandbox sees it; in perl, which the small root has."""


def inside_view(listing: Listing) -> dict[str, tuple[Any, ...]]:
    """What `INSIDE` should print."""
    found = {}
    for path, (kind, mode, uid, gid, data, _) in listing.items():
        found[path] = (kind, mode, uid, gid, len(data) if kind in "fl" else 0, sum(data) & 0xFFFFFFFF)
    return found


def parse_inside(printed: bytes) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for line in printed.split(b"\0\0")[:-1]:
        path, kind, *numbers = line.split(b"\0")
        mode, uid, gid, size, total = map(int, numbers)
        shown = kind.decode()
        found[path.decode()] = (shown, 0 if shown == "l" else mode, uid, gid, size if shown in "fl" else 0, total)
    return found


# -- snapshots and trajectories ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mind:
    """A conversation, as pairs of role and content, and the values of the state."""

    said: tuple[tuple[str, str], ...] = ()
    values: tuple[tuple[str, int], ...] = ()

    def edited(self, drop: int, added: tuple[tuple[str, str], ...], values: dict[str, int | None]) -> Mind:
        """Without the last messages, with others, and with values set or (None) removed."""
        kept = self.said[: len(self.said) - drop]
        changed = {**dict(self.values), **values}
        return Mind((*kept, *added), tuple(sorted((key, value) for key, value in changed.items() if value is not None)))


NOTHING = Mind()


@dataclass(slots=True)
class Taken:
    """A snapshot as it should be. `times`: what a restore showed first; later ones must show the same. `call`: the name
    of its tool."""

    id: str
    parent: str | None
    line: str
    seq: int
    tree: Tree
    failed: bool
    image: str
    state: str = "captured"
    tags: set[str] = field(default_factory=set)
    times: dict[str, int] | None = None
    mind: Mind = NOTHING
    call: str = ""

    @property
    def readable(self) -> bool:
        return self.state in ("captured", "stored")


@dataclass(slots=True)
class Line:
    """A trajectory as it should be. `upper`: see `Script`; `tree` is what its sandbox shows."""

    id: str
    head: str
    forked_from: str | None
    tree: Tree
    own: list[str] = field(default_factory=list)
    running: bool = True
    live_process: bool = False
    upper: set[int] = field(default_factory=set)
    loose_base: bool = False
    """It was captured by copying lately, so an older snapshot of it is still what it is built on."""


@dataclass(slots=True)
class World:
    snapshots: dict[str, Taken] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)

    def in_history(self, line: Line, item: Taken) -> bool:
        """Whether it is the trajectory's own, or lies before where that one, or the one that was forked from, was
        forked."""
        own, last = line, item.seq
        while item.line != own.id:
            if own.forked_from is None:
                return False
            source = self.snapshots[own.forked_from]
            own, last = self.lines[source.line], source.seq
        return item.seq <= last

    def always_kept(self) -> set[str]:
        """Never pruned, whatever the policy."""
        kept = {item.id for item in self.snapshots.values() if item.tags}
        for line in self.lines.values():
            kept.add(line.head)
            kept.update(line.own[:1])
            if line.forked_from is not None:
                kept.add(line.forked_from)
        return kept

    def candidates(self, policy: Policy) -> set[str]:
        """What a prune by this policy gives up, once everything is stored."""
        rules = (policy.keep_last, policy.keep_every, policy.keep_failed)
        if rules == (None, None, None):
            return set()
        kept = self.always_kept()
        for line in self.lines.values():
            kept.update(item.id for item in _by_rules([self.snapshots[s] for s in line.own], policy))
        return {item.id for item in self.snapshots.values() if item.readable and item.id not in kept}


def _by_rules(own: list[Taken], policy: Policy) -> Iterable[Taken]:
    with_files = [item for item in own if item.readable]
    if policy.keep_last:
        yield from with_files[-policy.keep_last :]
    if policy.keep_every:
        yield from (item for item in with_files if item.seq % policy.keep_every == 0)
    if policy.keep_failed:
        yield from [item for item in with_files if item.failed][-policy.keep_failed :]
