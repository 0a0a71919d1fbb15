"""What is imported while nothing is collected, in a process of its own: what is frozen stays so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.daemon.process import SMALL_DAEMON

_ALONE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from snapshotd.config import UserPlaces
from snapshotd.daemon.host import Footing
from snapshotd.kernel.abilities import Mode
from tests.small_daemon import open_small

beside = Path(sys.argv[2])
places = UserPlaces(beside / "state", beside, beside / "run", beside / "share")
(beside / "state").mkdir()
engine = open_small(beside / "state", Footing(places, Mode.FOLDER))
engine.life.close()
fleet = ("psycopg", "boto3", "botocore", "ray", "snapshotd.fleet", "snapshotd.engine.node", "snapshotd.repo.fleet")
engines = ("docker", "requests", "urllib3")
print([one for one in sys.modules if one in (*fleet, *engines) or one.startswith("snapshotd.fleet.")])

from snapshotd.daemon.http.api import create_app
from snapshotd.daemon.http.routes.shared import ROUTES, Service

create_app(Service(engine, beside / "state", 0))
print(len(ROUTES) > 100, [route for route in ROUTES if "_answering" in vars(route)])

import snapshotd.cli.main
from snapshotd.client import *

framework = (
    "agents", "claude_agent_sdk", "deepagents", "e2b", "inspect_ai", "langchain_core", "langgraph", "mcp", "minisweagent", "nemo_gym",
    "openai", "opentelemetry.sdk", "swerex",
)
print([one for one in sys.modules if one in framework or one.startswith("snapshotd.integrations.")])
"""
_PROGRAM = """
import gc
from contextlib import nullcontext
from snapshotd.daemon.importing import pause_collection

looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
with {}():
    import http.client, unittest.mock
print(gc.isenabled(), len(looks), gc.get_freeze_count() > 0)
"""


def _run(around: str) -> list[str]:
    program = [sys.executable, "-c", _PROGRAM.format(around)]
    return subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_modules_are_imported_without_a_look_for_garbage() -> None:
    assert _run("pause_collection") == ["True", "0", "True"]
    enabled, looks, frozen = _run("nullcontext")
    assert (enabled, frozen) == ("True", "False")
    assert int(looks) > 10


def test_neither_daemon_client_nor_command_line_loads_a_framework_nor_the_daemon_what_it_does_not_use(
    short_dir: Path,
) -> None:
    """The daemon's engine was opened and closed: it is alone, and no sandbox or image was asked of a Docker engine. No route
    takes requests apart before there is one."""
    program = [sys.executable, "-c", _ALONE, str(SMALL_DAEMON.parents[1]), str(short_dir)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SNAPSHOTD_")}
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.stdout, done.returncode) == ("[]\nTrue []\n[]\n", 0), done.stderr
