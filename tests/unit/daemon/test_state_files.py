from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from snapshotd.catalog.file import meta_in_file
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.config import Config
from snapshotd.daemon import state_files, wiring
from snapshotd.engine.runs.recover import was_killed
from snapshotd.errors import DataLoss, UsageError


def _check_logs(state_dir: Path) -> None:
    state_files.check_logs(state_dir, lambda: was_killed(lambda key: meta_in_file(state_dir / "catalog.db", key)))


@pytest.mark.parametrize(
    "made", ["repo/key", "repo/blobs/ab/x", "repo/store/packs/ab/x", "layers/images/x", "secrets.db"]
)
def test_content_says_that_there_was_a_catalog(tmp_path: Path, made: str) -> None:
    state_files.check_catalog(tmp_path)
    for name in ("layers/lost+found", "repo/store/packs"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "daemon.log").touch()
    state_files.check_catalog(tmp_path)
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    with pytest.raises(DataLoss, match=r"catalog\.db is missing .*--rebuild-catalog"):
        state_files.check_catalog(tmp_path)


@pytest.mark.parametrize("clean", ["", "boot"])
def test_a_missing_log_is_a_lost_one_after_a_kill_alone(tmp_path: Path, clean: str) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    catalog.set_meta("boot_id", "boot")
    catalog.set_meta("clean_boot_id", clean)
    catalog.close()
    assert (tmp_path / "catalog.db-wal").stat().st_size == 0, "no end removes a log"
    _check_logs(tmp_path)
    (tmp_path / "catalog.db-wal").unlink()
    for _ in range(2):  # to look makes no new one
        if clean:
            _check_logs(tmp_path)
        else:
            with pytest.raises(DataLoss, match=r"catalog\.db-wal is missing"):
                _check_logs(tmp_path)


def test_a_creation_that_was_cut_off_is_no_loss(tmp_path: Path) -> None:
    apsw.Connection(str(tmp_path / "catalog.db")).execute("PRAGMA application_id = 1; PRAGMA journal_mode = DELETE")
    _check_logs(tmp_path)


def test_a_rebuild_does_not_take_a_far_store_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "index.db").touch()
    with pytest.raises(UsageError, match="SNAPSHOTD_STORE"):
        wiring._find_store_url(Config(state_dir=str(tmp_path)))
