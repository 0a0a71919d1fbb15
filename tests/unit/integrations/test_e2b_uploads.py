"""Bounds on what the clients of one key upload: archives for builds, and files at once. And whose a key is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from snapshotd.errors import UsageError
from snapshotd.integrations.e2b.control.archives import StepArchives
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.inside import transfers
from snapshotd.integrations.e2b.inside.transfers import UploadPlaces
from snapshotd.integrations.e2b.keys import AccessKeys, owners_of

OLD, NEW, LAST = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture
def archives() -> Iterator[StepArchives]:
    made = StepArchives(owner_max_bytes=100)
    yield made
    made.close()


async def pieces(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield b"x" * size


def test_an_archive_gives_way_to_newer_ones_of_its_owner(archives: StepArchives) -> None:
    asyncio.run(archives.receive("one", OLD, pieces(30, 10)))
    asyncio.run(archives.receive("one", NEW, pieces(40)))
    asyncio.run(archives.receive("two", OLD, pieces(90)))
    assert archives.find("one", OLD).read_bytes() == b"x" * 40
    os.utime(archives.find("one", NEW), (1, 1))
    asyncio.run(archives.receive("one", LAST, pieces(50)))
    assert [archives.has("one", one) for one in (OLD, NEW, LAST)] == [True, False, True]
    assert archives.has("two", OLD)
    with pytest.raises(WireError, match="not uploaded"):
        archives.find("one", NEW)


def test_uploads_under_way_count(archives: StepArchives) -> None:
    with pytest.raises(WireError, match="under way"):
        asyncio.run(archives.receive("one", OLD, pieces(60, 60)))
    assert not archives.has("one", OLD)
    asyncio.run(archives.receive("one", OLD, pieces(100)))
    assert archives.has("one", OLD)


def test_a_digest_is_no_path(archives: StepArchives) -> None:
    with pytest.raises(WireError, match="hexadecimal"):
        archives.find("one", "../../../../etc/passwd")


def test_an_owner_has_so_many_uploads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "UPLOAD_WAIT_S", 0.01)

    async def run() -> None:
        places = UploadPlaces()
        ends = asyncio.Event()

        async def upload() -> None:
            async with places.take("one"):
                await ends.wait()

        running = [asyncio.create_task(upload()) for _ in range(transfers.UPLOADS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(WireError) as failed:
            async with places.take("one"):
                pass
        assert failed.value.status == 429
        async with places.take("two"):
            pass
        ends.set()
        await asyncio.gather(*running)
        async with places.take("one"):
            pass

    asyncio.run(run())


def test_a_key_has_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    (made,) = owners_of(path).items()
    assert made[0].startswith("e2b_")
    assert made[1] == "default"
    first, second = "e2b_" + "1" * 40, "e2b_" + "2" * 40
    path.write_text(f"{first}\n\n{second} acme\n")
    keys = AccessKeys(owners_of(path), b"secret")
    assert keys.owner(Headers({"x-api-key": first})) == "default"
    assert keys.owner(Headers({"authorization": f"Bearer {second}"})) == "acme"
    for wrong in (f"{first} acme", second[:-1], "", "acme"):
        with pytest.raises(WireError, match="missing or wrong"):
            keys.owner(Headers({"x-api-key": wrong}))
    for text in (f"{first}\n{first} acme\n", f"{first} acme more\n", "short\n"):
        path.write_text(text)
        with pytest.raises(UsageError):
            owners_of(path)
