"""Prunes users' folders by their rules: nobody has to think of it. A sandbox's trajectory waits for `snapshotd prune`."""

from __future__ import annotations

import logging
import threading

from snapshotd.api.storage import PruneRequest
from snapshotd.engine.storage.upkeep import Upkeep
from snapshotd.errors import SnapshotdError
from snapshotd.types import FOLDER, Trajectory

_log = logging.getLogger(__name__)


class FolderExpiry:
    """Prunes at once and then every `every_s` seconds, until `close`. 0: never. One thread."""

    def __init__(self, upkeep: Upkeep, every_s: float) -> None:
        self._upkeep, self._every_s = upkeep, every_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prune-folders")
        if every_s:
            self._thread.start()

    def close(self) -> None:
        """Wait for a prune that has begun. Idempotent."""
        self._closing.set()
        if self._every_s:
            self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                report = self._upkeep.prune(PruneRequest(), lambda _: None, only=_is_folder)
                if report.pruned:
                    _log.info("%d snapshots of users' folders gave up their files", len(report.pruned))
            except (SnapshotdError, OSError) as exc:
                _log.warning("the folders of users are not pruned, and will be later: %s", exc)
            if self._closing.wait(self._every_s):
                return


def _is_folder(trajectory: Trajectory) -> bool:
    return trajectory.spec.runtime == FOLDER
