"""How fast the funnel is on ordinary text: Python source and a log. `python benchmarks/redaction.py`; needs nothing,
takes seconds."""

from __future__ import annotations

import secrets
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from snapshotd.secrets.configured import Configured
from snapshotd.secrets.redactor import Funnel, Redactor
from snapshotd.secrets.scan import PIECE_BYTES, Patterns
from snapshotd.secrets.vault import Vault
from snapshotd.types import TrajectoryID, new_id

REPEAT = 5


def main() -> None:
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    log = b"".join(
        b"2026-01-02 03:04:%02d INFO worker-%d answered /api/v1/items/%d\n" % (n % 60, n % 7, n) for n in range(90_000)
    )
    configured = {f"env-KEY_{number}": secrets.token_urlsafe(32) for number in range(10)}
    patterns = Patterns(Configured(configured))
    with tempfile.TemporaryDirectory() as folder:
        vault = Vault(Path(folder))
        funnel = Redactor(vault).funnel(TrajectoryID(new_id()), configured)
        for name, data in (("source", source), ("log", log)):
            for what, find in (
                ("configured values", patterns.configured.needles.find),
                ("shapes", patterns.shapes.find),
            ):
                report(
                    f"{name}: {what}",
                    len(data),
                    lambda data=data, find=find: [find(piece, 0, False) for piece in pieces(data)],
                )
            for size in (64 << 10, 4 << 10, 80):
                report(
                    f"{name}: stream, pieces of {size} bytes",
                    len(data),
                    lambda data=data, size=size: stream(funnel, data, size),
                )
        short = "a short message of forty characters, so."
        seconds = best(lambda: [funnel.conceal_text(short) for _ in range(10_000)])
        print(f"{'short text':45} {seconds * 100:8.1f} us")
        vault.close()


def pieces(data: bytes, size: int = PIECE_BYTES) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def stream(funnel: Funnel, data: bytes, size: int) -> None:
    concealer = funnel.concealer(lambda _: None)
    for piece in pieces(data, size):
        concealer.write(piece)
    concealer.finish()


def best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def report(what: str, size: int, work: Callable[[], object]) -> None:
    print(f"{what:45} {size / best(work) / 1e6:8.0f} MB/s")


if __name__ == "__main__":
    main()
