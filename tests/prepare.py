"""Makes the images that tests use, and downloads wheels, before they run. `make setup` does it as root; it takes
minutes.

The tests make whatever of it is missing or old, so this changes how long they take and nothing else.
"""

from __future__ import annotations

import contextlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import built_images, guest
from tests.e2e import default_image, deployment


def _guest() -> None:
    with contextlib.suppress(pytest.skip.Exception):
        guest.prepare(guest.OLDEST)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        shared = Path(folder)
        jobs = (
            pool.submit(built_images.minimal_archive, shared),
            pool.submit(default_image.default_archive, shared),
            pool.submit(deployment.base_archive),
            pool.submit(_guest),
            pool.submit(deployment.stage, shared / "context"),  # for the wheels that it downloads
        )
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main()
