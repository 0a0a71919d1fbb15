"""The files of a state directory that must be there because others are.

A database that is missing is made anew in a new state directory alone. Anywhere else that would be an empty list with
exit code 0, and the next prune would remove what the lost catalog referred to. So each file's absence is judged by the
files that are made after it:

    catalog.db             made first, so any other content says that it must be there
    catalog.db-wal         holds the latest commits of a daemon that was killed (`Form.keeps_log`: no end of one removes it)
    secrets.db             made before the first trajectory
    secrets.db-wal         as the catalog's
    repo/key               made before the first trajectory
    repo/store/packs       made before the first snapshot is stored, where the packs lie in the state directory

`repo/key.py` judges the key where a part of the repository is left, `repo/format/index.py` the index, `secrets/key.py`
the vault's key.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from snapshotd.errors import DataLoss, UsageError

CATALOG, VAULT = "catalog.db", "secrets.db"
KEY = "repo/key"
_MADE_LATER = (KEY, "repo/blobs", "repo/index.db", "secrets.key", "secrets.db", "layers.img", "runs", "commands")
"""Each is made by a daemon that has a catalog. A folder `layers` or `repo/store` may be a mount that its owner made."""
_LOG_REMEDIES = {
    CATALOG: "restore it, or make the catalog again from the repository with `snapshotd daemon --rebuild-catalog`",
    VAULT: "restore it, or make an empty file of that name to go on without the secrets in it",
}
_LOST_AND_FOUND = "lost+found"


def check_catalog(state_dir: Path, *, may_have_key: bool = False) -> None:
    """DataLoss when there is no catalog although the directory has content of a daemon. `may_have_key`: the operator brings
    the repository's key to a new node of a fleet."""
    brought = {KEY} if may_have_key else set()
    if not (state_dir / CATALOG).exists() and (found := _content(state_dir, brought)) is not None:
        raise DataLoss(
            f"the catalog {state_dir / CATALOG} is missing although {found} is there: restore it from a backup, or make it "
            f"again from the repository with `snapshotd daemon --rebuild-catalog --state-dir {state_dir}`"
        )


def check_repository(state_dir: Path, has_trajectories: Callable[[], bool]) -> None:
    """DataLoss when the repository is missing although there are trajectories, which are made after its key."""
    key = state_dir / "repo" / "key"
    if not key.exists() and has_trajectories():
        raise DataLoss(
            f"the key {key} of the repository is missing although the catalog has trajectories: mount or restore {state_dir / 'repo'}; "
            "what is stored is there alone"
        )


def check_packs(state_dir: Path, stored: Callable[[], bool]) -> None:
    """DataLoss when the packs are missing although snapshots are `stored`. Call it before the store is opened, which
    makes its folder. The packs lie below the state directory."""
    packs = state_dir / "repo" / "store" / "packs"
    if not packs.is_dir() and stored():
        raise packs_missing(packs)


def packs_missing(packs: Path) -> DataLoss:
    """Return the error of a folder `packs` that is empty or missing although the catalog has stored snapshots."""
    return DataLoss(
        f"the packs {packs} are missing although the catalog has stored snapshots, whose files are there alone: mount or "
        f"restore {packs.parent}; if they are lost, make that folder with an empty folder packs in it, and `snapshotd repair` "
        "says what is gone"
    )


def nothing_to_rebuild_from(place: str, index: Path) -> DataLoss:
    """Return the error of a `place` that has no pack although the `index` names some."""
    return DataLoss(
        f"there are no packs in {place} to make a catalog from, although the index {index} has some: mount or restore that "
        "place; if they are lost, move the index away, and the new catalog will be empty"
    )


def _content(state_dir: Path, brought: Set[str]) -> Path | None:
    """A file or folder that only a daemon with a catalog makes; None in a new state directory."""
    made = [state_dir / name for name in _MADE_LATER if name not in brought]
    if (state_dir / "layers").is_dir():
        made += [each for each in (state_dir / "layers").iterdir() if each.name != _LOST_AND_FOUND]
    if has_packs(state_dir):
        made.append(state_dir / "repo" / "store" / "packs")
    return next((path for path in made if path.exists()), None)


def has_packs(state_dir: Path) -> bool:
    """True if a pack lies below the state directory."""
    return any((state_dir / "repo" / "store" / "packs").glob("??/*"))


def check_logs(state_dir: Path, was_killed: Callable[[], bool]) -> None:
    """DataLoss when a database's log is missing although the daemon before `was_killed`. Call it before any of the
    databases is opened, which makes a new log. `was_killed` is called where there is a catalog."""
    for name, remedy in _LOG_REMEDIES.items():
        log = state_dir / f"{name}-wal"
        there = (state_dir / CATALOG).exists() and (state_dir / name).exists()
        if there and not log.exists() and was_killed():
            raise DataLoss(
                f"the log {log} is missing although the daemon was killed, and the latest commits were in it: {remedy}"
            )


def other_store(state_dir: Path, known: str, wanted: str, *, can_unset: bool, is_node: bool) -> UsageError:
    """Return the error of settings that name another place of packs than the one that the state directory began with.
    `can_unset`: it began with the default place, which no node has."""
    way = "unset SNAPSHOTD_STORE" if can_unset else f"set SNAPSHOTD_STORE={known}"
    way = "" if can_unset and is_node else f"{way}, or "
    return UsageError(f"the packs of {state_dir} lie in {known!r}, not in {wanted!r}: {way}use another state directory")
