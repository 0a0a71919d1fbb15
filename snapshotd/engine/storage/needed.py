"""Layers that stay under any budget: the layers of snapshots, and the ones with installed packages."""

from __future__ import annotations

import json

from snapshotd.engine.context import Context
from snapshotd.types import LayerID

CACHE_KEY = "dependency_layers"


def cached_layers(context: Context) -> dict[str, LayerID]:
    """Hash of image and requirements to layer; a sweep must keep these layers."""
    return {key: LayerID(layer) for key, layer in json.loads(context.catalog.get_meta(CACHE_KEY) or "{}").items()}


def forget_cached_layers(context: Context) -> None:
    """Forget the layers with installed packages, which are gone: packages are installed again when needed."""
    context.catalog.set_meta(CACHE_KEY, "{}")


def referenced_layers(context: Context) -> set[LayerID]:
    """Every layer that a snapshot or the dependency cache needs."""
    return context.catalog.snapshots.referenced_layers() | set(cached_layers(context).values())
