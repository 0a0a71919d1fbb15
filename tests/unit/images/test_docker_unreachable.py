"""What somebody without a Docker engine is told."""

from __future__ import annotations

import pytest

from snapshotd.errors import NotFound, Unsupported
from snapshotd.images.docker import DockerImages


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("unix:///nonexistent", r"\(No such file or directory\)"),
        ("tcp://127.0.0.1:1", r"\(Connection refused\)"),
        ("bogus", r"\(Invalid bind address format: .*\)"),
    ],
)
def test_the_reason_is_the_systems_own(monkeypatch: pytest.MonkeyPatch, host: str, reason: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(Unsupported, match=f"the Docker engine cannot be reached {reason}; start it"):
        DockerImages().inspect("debian:12")


def test_an_error_that_the_caller_handles_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    try:
        raise NotFound("there is no experiment")
    except NotFound:
        with pytest.raises(Unsupported, match=r"cannot be reached \(No such file or directory\)"):
            DockerImages().inspect("debian:12")
