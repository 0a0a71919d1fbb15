"""Inspect's self check of sandboxes, over `SnapshotdEnvironment`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from snapshotd.integrations.inspect_ai import SnapshotdConfig, SnapshotdEnvironment

ADDUSER = """#!/bin/sh
for name; do :; done
echo "$name:x:1234:1234::/home/$name:/bin/sh" >> /etc/passwd && mkdir -p "/home/$name"
"""
"""As much of Debian's program as the check needs: the image has none."""


@pytest.fixture
async def sandbox_env() -> AsyncIterator[SnapshotdEnvironment]:
    config = SnapshotdConfig(runtime="runc")
    boxes = await SnapshotdEnvironment.sample_init("check", config, {})
    environment = boxes["default"]
    assert isinstance(environment, SnapshotdEnvironment)
    await environment.box.files.write("/usr/local/bin/adduser", ADDUSER, mode=0o755)
    yield environment
    await SnapshotdEnvironment.sample_cleanup("check", config, boxes, False)
    await SnapshotdEnvironment.cli_cleanup(environment.box.id)
