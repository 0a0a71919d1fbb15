"""The tests of the product as an ordinary user: where they run, and those that make no sense then.

`tests/system/test_ways.py` runs pytest as a user of `tests/ordinary_user.py`, with SNAPSHOTD_TEST_AS set to `range` or to
`one-id`. So commands, daemons, clients, and the tests themselves have that user's rights alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from snapshotd.config import places

WAY = os.environ.get("SNAPSHOTD_TEST_AS", "")
"""Empty: the tests run as whoever has started them."""
PIVOT, COPY = ("delta", "delta") if WAY else ("pivot", "copy")
"""The method of a snapshot between two calls, and of one while something is alive (docs/install.md, "Without root")."""
ADDRESS = os.environ.get("SNAPSHOTD_TEST_ADDRESS", "")
"""An address of this machine that sandboxes with a network reach, which only root could make."""
_IMAGE = os.environ.get("SNAPSHOTD_TEST_IMAGE", "")
_AS_DAEMON = (
    "import os, sys; from snapshotd.kernel import rootless; rootless.enter(); os.execvp(sys.argv[1], sys.argv[1:])"
)
_LIMITS = "limits of memory, processors and processes"
_OWNERS = "what is restored keeps its owners"
_MOUNT = "mounts that the user's programs see"
_USERS = "users of a sandbox besides root"
_SEEN = "the test looks into the sandbox's processes, or its root, from outside"
_DEFAULT = "the default image is not built for this"
LEFT_OUT = {
    "test_exec.py::test_a_limit_that_a_command_reached_is_named": _LIMITS,
    "test_exec.py::test_a_run_that_was_out_of_memory_says_so": _LIMITS,
    "test_reuse.py::test_it_has_to_begin_in_the_same_way": _LIMITS,
    "test_rewind.py::test_the_chosen_parts_go_back_as_previewed_and_undo_restores_them": _OWNERS,
    "test_run.py::test_hard_links_survive_a_change_of_both_names": "a single name that is written splits off",
    "test_run.py::test_dependencies_are_installed_once_and_the_agent_needs_no_network": _DEFAULT,
    "test_run.py::test_dependencies_that_do_not_exist_are_said_in_pips_words": _DEFAULT,
    "test_share.py::test_a_tar": _OWNERS,
    "test_share.py::test_looking_through_folders": _MOUNT,
    "test_share.py::test_the_browsing_process_is_killed": _MOUNT,
    "test_shell.py::test_a_person_edits_lines_and_goes_back": _SEEN,
    "test_survive.py::test_behind_the_gateway": _SEEN,
    "test_uncommitted.py::test_what_came_back_goes_again_by_itself": "a start before the layers of a cold snapshot are written",
    "test_background.py::test_a_full_disk_ends_it_and_nothing_else": "the test mounts a full disk",
}
"""A test, or a whole file, and what it needs that an ordinary user has not, or has in another way (docs/install.md)."""
LEFT_OUT_OF_ONE_ID = {
    "test_exec.py::test_a_command_runs_as_a_user_named_in_the_sandbox": _USERS,
    "test_files.py::test_each_write_is_a_step_that_a_rewind_takes_back": _USERS,
    "test_merge.py": _USERS,
    "test_pipes.py::test_standard_input_reaches_a_command": _USERS,
    "test_run.py::test_a_run_as_another_user": _USERS,
}
"""The same for a user with one id."""


def minimal_archive() -> Path | None:
    """The archive of the minimal image, which root has built: the user cannot write to the cache."""
    return Path(_IMAGE) if WAY else None


def shared_folder() -> Path:
    """A folder that all of this user's runs share, so that the image is taken in once."""
    folder = Path.home() / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def owning(*argv: str | Path) -> list[str]:
    """A command line that runs a program with the owners of a state directory's files, who are the user's range of ids."""
    as_daemon = [sys.executable, "-c", _AS_DAEMON] if WAY else []
    return [*as_daemon, *map(str, argv)]


def run_root() -> Path:
    """The directory of this user's daemons for what lasts until the machine boots, as it is outside of them."""
    found = places()
    return found.run_source or found.run_root


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark what an ordinary user does not have."""
    left_out = {**LEFT_OUT, **(LEFT_OUT_OF_ONE_ID if WAY == "one-id" else {})}
    for item in items:
        file, test = item.path.name, item.name.partition("[")[0]
        reason = left_out.get(file) or left_out.get(f"{file}::{test}")
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
