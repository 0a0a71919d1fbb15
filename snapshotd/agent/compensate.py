"""`python3 -m snapshotd.agent.compensate FILE FUNCTION`: undo a call, by the function that was its `compensate`.

The call comes as JSON in SNAPSHOTD_CALL (`name`, `arguments`, `result`, `key`) and is handed to the function as a dict.
FILE is imported as a module, in its package if it lies in one. Actions of the function are part of the compensation,
which the daemon records: the function makes no records of its own. Exit status 0 if the function returned, 1 if it
raised, 2 for a wrong invocation, 75 (NOT_BEGUN) if it was not called, since it could not be imported: only then may the
same compensation be tried again.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any, List

from snapshotd.agent.session import session

CALL_VARIABLE = "SNAPSHOTD_CALL"
NOT_BEGUN = 75


def main(arguments: List[str]) -> int:
    """Run it. Exceptions of the function leave this one."""
    if len(arguments) != 2 or CALL_VARIABLE not in os.environ:
        sys.stderr.write("usage: {}=JSON python3 -m snapshotd.agent.compensate FILE FUNCTION\n".format(CALL_VARIABLE))
        return 2
    file, name = arguments
    call = json.loads(os.environ[CALL_VARIABLE])
    session.refuse(
        "{} was imported to find {}, which undoes a call, and ran the agent; put the program's start under "
        '`if __name__ == "__main__":`.'.format(file, name)
    )
    try:
        function = getattr(module_of(file), name)
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a program does that was not to start
        traceback.print_exc()
        return NOT_BEGUN
    session.refuse(None)
    session.leave()
    try:
        function(call)
    except SystemExit as exc:
        return 1 if exc.code else 0
    return 0


def module_of(file: str) -> Any:
    """Import a file, as a member of the package it lies in if there is one."""
    folder, name = os.path.split(os.path.abspath(file))
    parts = [os.path.splitext(name)[0]]
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        parts.insert(0, package)
    sys.path.insert(0, folder)
    if parts[-1] == "__init__":
        parts.pop()
    if len(parts) > 1 or parts[0].isidentifier():
        found = importlib.import_module(".".join(parts))
        if os.path.realpath(getattr(found, "__file__", None) or "") == os.path.realpath(file):
            return found
    # a name that is no identifier (my-agent.py), or that something else already has (json.py)
    spec = importlib.util.spec_from_file_location("_compensated", file)
    if spec is None or spec.loader is None:
        raise ImportError("{} is not a Python file".format(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules["_compensated"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
