"""What the environment of a trajectory is recorded as."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.secrecy import PROVIDER, Secrecy
from snapshotd.errors import UsageError
from snapshotd.secrets.vault import Vault
from snapshotd.types import TrajectoryID


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{PROVIDER}OPENAI_KEY", "the key for the provider openai has 3 characters"),
        (f"{PROVIDER}GEMINI_KEY", "the key for the provider gemini has 3 characters"),
        ("TOKEN", "the secret TOKEN has less than"),
    ],
)
def test_a_value_that_is_too_short_is_named_as_the_user_knows_it(tmp_path: Path, name: str, said: str) -> None:
    secrecy = Secrecy(Vault(tmp_path, lambda: True), SqliteCatalog(tmp_path / "catalog.db"))
    with pytest.raises(UsageError) as raised:
        secrecy.environment(TrajectoryID("a" * 32), (), ((name, "abc"),))
    assert said in raised.value.message
    assert "SNAPSHOTD_" not in raised.value.message
    assert "abc" not in raised.value.message
