"""One repository as the archive process has it: opened for writing when first needed, collected, checked and repaired
in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from snapshotd.errors import DataLoss, OutOfSpace
from snapshotd.repo.base import CheckResult, Fault, Maintenance, Reclaimed, RepairResult, Roots
from snapshotd.repo.format.index import Index
from snapshotd.repo.upkeep import check, gc, repair
from snapshotd.repo.writing import reserve
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.base import Store


class PackMaintenance(Maintenance):
    """Owns the repository's writer. Not thread-safe."""

    _index_kind: type[Index] = Index

    def __init__(self, store: Store, index_path: Path, key: bytes, packer_command: Sequence[str] | None = None) -> None:
        """`packer_command`: see `PackRepository`."""
        self._packer_command = packer_command
        self._store, self._index_path, self._key = store, index_path, key
        self._writer: PackRepository | None = None

    def writer(self) -> PackRepository:
        """Opened if it is not. On a full disk the reserve is given up for it."""
        if self._writer is not None and self._writer.refuses:
            self._end_writer()
        if self._writer is None:
            try:
                self._writer = self._open()
            except OutOfSpace:
                if not reserve.give_up(self._index_path):
                    raise
                self._writer = self._open()
            reserve.make(self._index_path)
        return self._writer

    def _open(self) -> PackRepository:
        return PackRepository(
            self._store, self._index_path, self._key, packer_command=self._packer_command, index_kind=self._index_kind
        )

    def collect(
        self,
        roots: Roots,
        *,
        grace_s: float,
        now: float,
        dry_run: bool,
        progress: Callable[[str], object],
        wanted: Callable[[bytes], bool] = lambda _: False,
    ) -> Reclaimed:
        writer = self.writer()
        if not dry_run:
            writer.give_up()  # else packs and bases go that a later flush would index all the same
        reader, index = writer.reader, writer.index
        plan = partial(gc.plan, reader, index, roots, grace_s=grace_s, now=now, progress=progress, wanted=wanted)
        planned = plan()
        if dry_run:
            return planned.reclaimed
        try:
            return gc.run(reader, index, planned, progress)
        except OutOfSpace:
            if not reserve.give_up(self._index_path):
                raise
            planned = plan()
            return gc.run(reader, index, planned, progress)
        finally:
            reserve.make(self._index_path)

    def check(self, roots: Roots, *, read_data: bool, progress: Callable[[str], object]) -> CheckResult:
        try:
            writer = self.writer()
        except DataLoss as exc:
            owners = {*roots.trees.values(), *roots.contents.values(), *roots.records.values()} - {""}
            return CheckResult(0, 0, 0, (Fault(exc.message),), tuple(sorted(owners)))
        writer.reader.forget()
        return check.check(writer.reader, writer.index, roots, read_data=read_data, progress=progress)

    def repair(self, progress: Callable[[str], object]) -> RepairResult:
        self._end_writer()
        return repair.repair(self._store, self._index_path, self._key, progress)

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
