"""A program that is no part of the image or the workspace: a folder of this machine, taken in once as a layer.

The layer holds it at `PLACE`, and is cached by the names, sizes and times of the folder's files, as the layers of Python
packages are.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from snapshotd.engine.context import Context
from snapshotd.engine.runs.inputs import open_seen
from snapshotd.engine.storage.needed import CACHE_KEY, cached_layers
from snapshotd.errors import NotFound, UsageError
from snapshotd.formats.ingest import ingest_folder
from snapshotd.kernel import files
from snapshotd.layers.upper import dress
from snapshotd.types import LayerID, Stack

PLACE = b"opt/agent-program"
MOST_FILES = 200_000


def layer_for(context: Context, below: Stack, folder: Path, namespace_pid: int) -> LayerID:
    """The layer with the folder's content: the cached one, or a new one. NotFound, UsageError."""
    key = _key(folder, namespace_pid)
    cached = cached_layers(context)
    if key in cached and cached[key] in context.store.layers():
        return cached[key]
    with context.store.making() as layer:
        dress(context.store, layer, below)
        with (
            files.closing_fd(context.store.read_upper(layer)) as root,
            files.closing_fd(files.make_dirs(root, PLACE)) as place,
        ):
            ingest_folder(folder, place, namespace_pid)
        context.store.drop_work(layer)
        context.catalog.set_meta(CACHE_KEY, json.dumps({**cached_layers(context), key: layer}))
    context.store.unpin([layer])
    return layer


def _key(folder: Path, namespace_pid: int) -> str:
    """Names, sizes and times of the folder's files, without a look at their content."""
    try:
        fd = open_seen(folder, namespace_pid)
    except FileNotFoundError as exc:
        raise NotFound(f"the program's folder {folder} does not exist; install it, or name another") from exc
    except OSError as exc:
        raise UsageError(f"the program's folder {folder} cannot be read: {exc.strerror}") from exc
    found = hashlib.sha256(b"program:" + os.fsencode(folder))
    count = 0
    try:
        if os.path.samestat(os.fstat(fd), os.stat("/")):
            raise UsageError(
                f"the program's folder {folder} is the whole machine; name the folder that holds the program"
            )
        for parent, directories, names, at in os.fwalk(".", dir_fd=fd):
            directories.sort()
            for name in sorted(names):
                st = os.stat(name, dir_fd=at, follow_symlinks=False)
                found.update(
                    f"{parent}/{name}\0{st.st_size}\0{st.st_mtime_ns}\0{st.st_mode}\n".encode(errors="surrogateescape")
                )
                count += 1
            if count > MOST_FILES:
                raise UsageError(f"the program's folder {folder} has more than {MOST_FILES} files; name a smaller one")
    except NotADirectoryError as exc:
        raise UsageError(f"{folder} is no folder; name the one that holds the program") from exc
    except OSError as exc:
        name = os.fsdecode(exc.filename or "a file")
        raise UsageError(
            f"the program's folder {folder} cannot be read: {name}: {exc.strerror}; leave it alone meanwhile, or name another"
        ) from exc
    finally:
        os.close(fd)
    return found.hexdigest()
