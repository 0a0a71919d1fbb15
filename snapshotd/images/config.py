"""The part of a foreign image's configuration that is used: its environment and working directory, checked."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from snapshotd.errors import UsageError

DEFAULT_WORKDIR = "/workspace"
_ENV_LIMIT = 1000
_ENV_LIMIT_BYTES = 128 << 10
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "386": "i686", "arm": "armv7l"}


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """`source_id` names the foreign image's content (`image:sha256:…`), so that it is taken only once."""

    source_id: str
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = DEFAULT_WORKDIR


def parse_config(source_id: str, config: Any, what: str) -> ImageConfig:
    """From the `config` object of an image. `what` names the image. UsageError when env or workdir cannot be used."""
    if config is None:
        config = {}
    if not isinstance(config, dict):
        raise UsageError(f"the configuration of {what} is malformed: it is not an object")
    env, workdir = config.get("Env") or [], config.get("WorkingDir") or ""
    if not isinstance(env, list) or not all(isinstance(item, str) and "\0" not in item for item in env):
        raise UsageError(f"the configuration of {what} is malformed: Env is not a list of strings")
    if len(env) > _ENV_LIMIT or sum(map(len, env)) > _ENV_LIMIT_BYTES:
        raise UsageError(
            f"the configuration of {what} has an environment of more than {_ENV_LIMIT} entries or {_ENV_LIMIT_BYTES} bytes"
        )
    pairs = dict(item.partition("=")[::2] for item in env)
    pairs.pop("", None)
    if (
        not isinstance(workdir, str)
        or "\0" in workdir
        or len(workdir) > 4095
        or (workdir and not workdir.startswith("/"))
    ):
        raise UsageError(f"the configuration of {what} is malformed: its working directory is not an absolute path")
    return ImageConfig(source_id, tuple(pairs.items()), workdir if workdir.strip("/") else DEFAULT_WORKDIR)


def check_platform(os_name: object, architecture: object, what: str) -> None:
    """UsageError when the image's programs cannot run on this machine. Unknown or missing values pass."""
    machine = _MACHINES.get(str(architecture or ""), "")
    if os_name not in (None, "", "linux") or (machine and machine != platform.machine()):
        raise UsageError(
            f"{what} is built for {os_name}/{architecture}, which this {platform.machine()} machine cannot run"
        )
