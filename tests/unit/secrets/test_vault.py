"""The vault keeps what it was given, for its owner alone, through crashes, and notices every damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from snapshotd.errors import DataLoss, InternalError, NotFound, SnapshotdError, VersionMismatch
from snapshotd.secrets import vault as vault_module
from snapshotd.secrets.base import MARKER, MARKER_MAX_BYTES, Found
from snapshotd.secrets.vault import DATABASE_NAME, KEY_NAME, Vault
from snapshotd.types import TrajectoryID

A, B, C = (TrajectoryID(letter * 32) for letter in "abc")
TOKEN = Found("github-token", b"ghp_not-a-real-one")


def execute(state: Path, sql: str, values: tuple[object, ...] = ()) -> None:
    conn = apsw.Connection(str(state / DATABASE_NAME))
    conn.execute(sql, values).fetchall()  # type: ignore[arg-type]
    conn.close()


def all_bytes(state: Path) -> bytes:
    return b"".join(path.read_bytes() for path in state.iterdir())


def test_what_was_kept_is_there_again(state: Path) -> None:
    vault = Vault(state)
    others = [Found("empty", b""), Found("binary", bytes(range(256))), Found("long", b"x" * 100_000)]
    markers = vault.keep(A, [TOKEN, *others, TOKEN])
    assert markers[0] == markers[-1] == vault.marker(TOKEN)
    assert all(MARKER.fullmatch(marker) and len(marker) <= MARKER_MAX_BYTES for marker in markers)
    vault.flush()
    vault.close()
    vault.close()
    again = Vault(state)
    assert [again.reveal(marker, [A]) for marker in markers] == [found.value for found in (TOKEN, *others, TOKEN)]
    assert again.keep(A, [TOKEN]) == markers[:1]
    again.close()


def test_nothing_is_in_the_files_in_plain_text(state: Path) -> None:
    vault = Vault(state)
    vault.keep(A, [TOKEN])
    vault.flush()
    assert TOKEN.value not in all_bytes(state)
    assert {path.stat().st_mode & 0o7777 for path in state.iterdir()} == {0o600}
    vault.close()
    assert TOKEN.value not in all_bytes(state)


def test_markers_of_one_vault_mean_nothing_to_another(tmp_path: Path) -> None:
    vaults = []
    for name in "xy":
        (tmp_path / name).mkdir()
        vaults.append(Vault(tmp_path / name))
    assert vaults[0].marker(TOKEN) != vaults[1].marker(TOKEN)
    for vault in vaults:
        vault.close()


def test_only_owners_see_it(state: Path) -> None:
    vault = Vault(state)
    (marker,) = vault.keep(A, [TOKEN])
    assert vault.reveal(marker, [B, A]) == TOKEN.value
    for owners in ([], [B], [B, C]):
        assert vault.reveal(marker, owners) is None
    for text in (
        "",
        "x",
        marker[:-1],
        marker + " ",
        marker.upper(),
        f"[secret:other:{marker[-17:-1]}]",
        "'; DROP TABLE secrets; --",
    ):
        assert vault.reveal(text, [A]) is None
    vault.close()


def test_forget(state: Path) -> None:
    vault = Vault(state)
    mine, theirs = vault.keep(A, [Found("n", b"mine")]) + vault.keep(B, [Found("n", b"of another")])
    vault.forget(A)
    vault.forget(A)
    assert vault.reveal(mine, [A]) is None
    assert vault.reveal(theirs, [B]) == b"of another"
    vault.close()


def test_bounds(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_module, "MAX_KEPT", 3)
    monkeypatch.setattr(vault_module, "MAX_KEPT_BYTES", 100)
    vault = Vault(state)
    markers = vault.keep(
        A, [Found("n", b"1" * 60), Found("n", b"2" * 60), *(Found("n", b"%d" % number) for number in range(5))]
    )
    assert [vault.reveal(marker, [A]) is not None for marker in markers] == [
        True,
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    vault.close()
    again = Vault(state)  # bounds hold across restarts
    (late,) = again.keep(A, [Found("n", b"late")])
    (other,) = again.keep(B, [Found("n", b"late")])
    assert late == other
    assert again.reveal(late, [A]) is None
    assert again.reveal(late, [B]) == b"late"
    again.close()


def test_a_row_that_was_changed_or_moved_is_noticed(state: Path) -> None:
    vault = Vault(state)
    (marker,) = vault.keep(A, [TOKEN])
    vault.close()
    conn = apsw.Connection(str(state / DATABASE_NAME))
    ((good,),) = conn.execute("SELECT sealed FROM secrets").fetchall()
    conn.close()
    bad = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    for sealed in (*bad, b"", good[:12], good[:-1], good + b"x", 7, "text"):
        execute(state, "UPDATE secrets SET sealed = ?", (sealed,))
        damaged = Vault(state)
        with pytest.raises(DataLoss, match=r"github-token.*backup"):
            damaged.reveal(marker, [A])
        damaged.close()
    execute(state, "UPDATE secrets SET sealed = ?, trajectory = ?", (good, B))
    damaged = Vault(state)
    with pytest.raises(DataLoss):
        damaged.reveal(marker, [B])
    damaged.close()
    other = marker[:-2] + ("0]" if marker[-2] != "0" else "1]")
    execute(state, "UPDATE secrets SET trajectory = ?, marker = ?", (A, other))
    damaged = Vault(state)
    with pytest.raises(DataLoss):
        damaged.reveal(other, [A])
    damaged.close()


def made(state: Path) -> None:
    vault = Vault(state)
    vault.keep(A, [TOKEN])
    vault.close()


def foreign_key(state: Path) -> None:
    (state / "other").mkdir()
    made(state / "other")
    os.replace(state / "other" / KEY_NAME, state / KEY_NAME)


def flipped_key(state: Path) -> None:
    data = bytearray((state / KEY_NAME).read_bytes())
    data[20] ^= 1
    (state / KEY_NAME).write_bytes(data)


DAMAGES = {
    "no key": lambda state: (state / KEY_NAME).unlink(),
    "empty key": lambda state: (state / KEY_NAME).write_bytes(b""),
    "damaged key": flipped_key,
    "another vault's key": foreign_key,
    "empty database": lambda state: (state / DATABASE_NAME).write_bytes(b""),
    "no database at all": lambda state: (state / DATABASE_NAME).write_bytes(b"not a database" * 1000),
    "another application's": lambda state: execute(state, "PRAGMA application_id = 7"),
    "no format": lambda state: execute(state, "PRAGMA user_version = 0"),
    "no check": lambda state: execute(state, "DELETE FROM meta"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_never_a_fresh_start(state: Path, damage: str) -> None:
    made(state)
    DAMAGES[damage](state)
    log = {f"{DATABASE_NAME}-wal", f"{DATABASE_NAME}-shm"}
    before = {path.name for path in state.iterdir()} - log
    with pytest.raises(DataLoss, match="secrets"):
        Vault(state)
    assert {path.name for path in state.iterdir()} - log == before


def test_newer_format(state: Path) -> None:
    made(state)
    execute(state, "PRAGMA user_version = 2")
    with pytest.raises(VersionMismatch, match="newer"):
        Vault(state)


def test_a_key_file_that_is_a_link_is_not_followed(state: Path) -> None:
    made(state)
    (state / KEY_NAME).rename(state / "elsewhere")
    (state / KEY_NAME).symlink_to("elsewhere")
    with pytest.raises(SnapshotdError):
        Vault(state)


def test_creation_that_was_cut_off_is_begun_again(state: Path) -> None:
    made(state)
    (state / DATABASE_NAME).unlink()  # after the key, before the database
    (state / f"{KEY_NAME}.new").write_bytes(b"half")
    (state / f"{DATABASE_NAME}.new").write_bytes(b"half")
    made(state)
    assert (state / DATABASE_NAME).exists()


def test_no_directory(state: Path) -> None:
    with pytest.raises(NotFound, match="folder does not exist"):
        Vault(state / "nowhere")


def test_use_after_close_is_a_defect(state: Path) -> None:
    vault = Vault(state)
    vault.close()
    for call in (
        lambda: vault.keep(A, [TOKEN]),
        vault.flush,
        lambda: vault.forget(A),
        lambda: vault.reveal(vault.marker(TOKEN), [A]),
    ):
        with pytest.raises(InternalError):
            call()


CHILD = """
import sys
from pathlib import Path
from snapshotd.secrets.base import Found
from snapshotd.secrets.vault import Vault
vault = Vault(Path(sys.argv[1]))
number = 0
while True:
    print(*vault.keep("a" * 32, [Found("n", b"value %d" % number), Found("n", b"twin of %d" % number)]), flush=True)
    number += 1
"""


def test_what_keep_returned_survives_kill_9(state: Path) -> None:
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(state)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        told = [child.stdout.readline().split() for _ in range(30)]
        child.send_signal(signal.SIGKILL)
        told += [line.split() for line in child.stdout if line.endswith("\n")]
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        vault = Vault(state)
        for number, (one, twin) in enumerate(told):
            assert vault.reveal(one, [A]) == b"value %d" % number
            assert vault.reveal(twin, [A]) == b"twin of %d" % number
        vault.close()


def test_many_threads(state: Path) -> None:
    vault = Vault(state)
    failed: list[BaseException] = []

    def work(owner: TrajectoryID) -> None:
        try:
            for number in range(100):
                found = Found("n", b"%s %d" % (owner.encode(), number % 40))
                (marker,) = vault.keep(owner, [found])
                assert vault.reveal(marker, [owner]) == found.value
                if number % 20 == 0:
                    vault.flush()
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=work, args=(owner,)) for owner in (A, A, B, C)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    vault.close()
    assert failed == []


def test_a_failed_flush_is_final(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(state)

    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        with pytest.raises(DataLoss, match="Input/output"):
            vault.flush()
    with pytest.raises(DataLoss, match="Input/output"):
        vault.flush()
    vault.close()


def test_a_vault_that_is_missing_is_made_anew_in_a_new_state_directory_alone(tmp_path: Path) -> None:
    Vault(tmp_path).close()
    for path in tmp_path.glob("secrets.db*"):
        path.unlink()
    with pytest.raises(DataLoss, match=r"secrets\.db is missing.* remove .*secrets\.key, too"):
        Vault(tmp_path, lambda: False)
    assert not (tmp_path / "secrets.db").exists()
    Vault(tmp_path, lambda: True).close()  # the first start was cut off behind the key
    for path in tmp_path.iterdir():
        path.unlink()
    Vault(tmp_path, lambda: False).close()  # the stated way
