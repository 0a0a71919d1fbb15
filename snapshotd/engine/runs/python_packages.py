"""An agent's own dependencies: installed once, in a throw-away sandbox with network, into a layer that is cached by
their hash.

They come from `--requirements FILE` or from the agent file's inline metadata (PEP 723). The agent's sandbox needs no
network then: the layer holds /opt/agent-packages, which is on its PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from snapshotd.api.trajectories import SandboxFields
from snapshotd.config import read_variables
from snapshotd.engine.context import Context
from snapshotd.engine.runs.inputs import open_agent, open_seen
from snapshotd.engine.storage.needed import CACHE_KEY, cached_layers
from snapshotd.errors import CommandNotFound, NotFound, UsageError
from snapshotd.kernel import files
from snapshotd.types import LayerID, Network, SandboxSpec

PACKAGES_DIR = "/opt/agent-packages"
MAX_METADATA_BYTES = 1 << 20
_INLINE = re.compile(r"(?m)^# /// script\s*$\n(?P<body>(^#(| .*)$\n)+)^# ///\s*$")
_HOST_CA = "/etc/ssl/certs/ca-certificates.crt"
_PIP_SETTINGS = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_TRUSTED_HOST",
    "PIP_DEFAULT_TIMEOUT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)

Installer = Callable[[SandboxSpec, str, dict[str, str], bytes], LayerID]
"""Runs a shell script in a throw-away sandbox of this spec, with environment and CA bundle, and returns a layer with
PACKAGES_DIR only."""


def read_requirements(request: SandboxFields, agent: Path | None, namespace_pid: int) -> tuple[str, ...]:
    """The requirement lines of a sandbox, in order: of its file, else of its agent's. UsageError when the
    file or the metadata cannot be read."""
    if request.requirements is not None:
        try:
            opened = files.closing_fd(open_seen(Path(request.requirements), namespace_pid))
            with opened as fd, open(fd, closefd=False) as f:  # `open` leaves that of a directory open
                text = f.read()
        except FileNotFoundError as exc:
            raise NotFound(f"requirements file {request.requirements!r} does not exist") from exc
        except (OSError, UnicodeDecodeError) as exc:
            raise UsageError(f"requirements file {request.requirements!r} cannot be read: {exc}") from exc
        lines = (line.strip() for line in text.splitlines())
        return tuple(line for line in lines if line and not line.startswith("#"))
    return _inline(agent, namespace_pid) if agent is not None else ()


def _inline(agent: Path, namespace_pid: int) -> tuple[str, ...]:
    with open(open_agent(agent, namespace_pid), "rb") as f:
        text = f.read(MAX_METADATA_BYTES).decode(errors="replace")
    match = _INLINE.search(text)
    if match is None:
        return ()
    body = "".join(line[2:] if line.startswith("# ") else line[1:] for line in match["body"].splitlines(keepends=True))
    try:
        found = tomllib.loads(body).get("dependencies", [])
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"the inline metadata (PEP 723) of {str(agent)!r} is not valid TOML: {exc}") from exc
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise UsageError(f"`dependencies` in the inline metadata (PEP 723) of {str(agent)!r} must be a list of strings")
    return tuple(found)


def layer_for(context: Context, spec: SandboxSpec, requirements: tuple[str, ...], install: Installer) -> LayerID:
    """The layer with these packages for this image: the cached one, or a new one. UsageError with pip's own words when
    pip fails."""
    key = hashlib.sha256(json.dumps([spec.image, requirements]).encode()).hexdigest()
    cached = cached_layers(context)
    if key in cached and cached[key] in context.store.layers():
        return cached[key]
    environment = read_variables(_PIP_SETTINGS)
    bundle = Path(_HOST_CA).read_bytes() if os.path.exists(_HOST_CA) else b""
    if bundle:
        environment["PIP_CERT"] = "/run/snapshotd/ca.pem"
    online = SandboxSpec(spec.image, spec.runtime, Network.BRIDGE, spec.limits)
    quoted = " ".join("'" + line.replace("'", "'\\''") + "'" for line in requirements)
    script = f"python3 -m pip install --no-cache-dir --disable-pip-version-check -q --target {PACKAGES_DIR} {quoted}"
    try:
        layer = install(online, script, environment, bundle)
    except CommandNotFound as exc:
        raise UsageError(
            "the image has no shell to install dependencies with; use an image with python3 and pip"
        ) from exc
    context.catalog.set_meta(CACHE_KEY, json.dumps({**cached_layers(context), key: layer}))
    context.store.unpin([layer])
    return layer


def keep_packages_only(context: Context, upper: LayerID) -> LayerID:
    """Move PACKAGES_DIR out of a finished throw-away upper into a layer of its own. The caller unpins it."""
    with context.store.making() as layer:
        name = PACKAGES_DIR.rpartition("/")[2]
        with (
            files.closing_fd(context.store.read_upper(upper)) as source,
            files.closing_fd(context.store.read_upper(layer)) as target,
            files.closing_fd(files.make_dirs(target, b"opt")) as opt,
            files.closing_fd(files.open_dir(source, b"opt")) as source_opt,
        ):
            os.rename(name, name, src_dir_fd=source_opt, dst_dir_fd=opt)
        context.store.drop_work(layer)
    return layer
