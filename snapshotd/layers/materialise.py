"""Write a view into a directory, with everything that can be kept: modes, owners, times, attributes, links, holes, special nodes.

The tree is an attacker's and the target is the host's: everything goes through directory descriptors, nothing is followed, nothing that
exists is opened. What comes out is exact, set-user-id files and device nodes included; whoever restores decides who may reach it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator

from snapshotd.errors import OutOfSpace
from snapshotd.kernel.files import copy_data, entry_fd, is_empty_dir, open_dir
from snapshotd.layers.base import Entry, Kind, RestoreReport
from snapshotd.layers.lookup import Directory, Handles, Node
from snapshotd.layers.view import Child, View, join
