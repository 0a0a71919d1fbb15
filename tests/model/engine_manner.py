"""What the ways of running sandboxes make different for the walk: the pivot of root's daemon, the copies of an ordinary
user's, and the plain folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests import way
from tests.model.engine_oracle import Listing, Tree

FOLDER = "none"
"""The name that the runtime of sandboxes without isolation has."""
_ROOT_ALONE, _SEVERAL = (0,), (0, 1000, 65534)


@dataclass(frozen=True, slots=True)
class Manner:
    options: dict[str, Any]
    """Of the request that makes a sandbox."""
    links_stay: bool
    """Every name of a hard link group shows a change of one of them; else an overlay tears groups that lie below its
    live layer."""
    owners: tuple[int, ...]
    """Those that a program in the sandbox may give files to."""
    owners_outside: bool
    """Files that are restored, or given to a new sandbox, keep their owners; else they are the daemon's user's."""
    seen_from_outside: bool
    """The test may go through a sandbox's root by /proc."""

    @staticmethod
    def of(runtime: str) -> Manner:
        if runtime == FOLDER:
            return Manner({"runtime": runtime}, True, _ROOT_ALONE, not way.WAY, False)
        if way.WAY:
            return Manner({}, True, _SEVERAL if way.WAY == "range" else _ROOT_ALONE, False, False)
        return Manner({"runtime": runtime}, False, _SEVERAL, True, True)

    def outside(self, found: Listing, wanted: Listing) -> tuple[Listing, Listing]:
        """Two listings as far as they may differ outside of a sandbox."""
        return (found, wanted) if self.owners_outside else (_without_owners(found), _without_owners(wanted))

    def given(self, tree: Tree) -> Tree:
        """A tree that was restored, in the sandbox that it is given to."""
        if self.owners_outside:
            return tree
        return Tree(dict(tree.names), {inode: replace(node, uid=0, gid=0) for inode, node in tree.nodes.items()})


def _without_owners(listing: Listing) -> Listing:
    return {path: (*entry[:2], 0, 0, *entry[4:]) for path, entry in listing.items()}
