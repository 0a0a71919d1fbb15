"""The child processes' end of their protocol."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
from snapshotd.engine import child
from snapshotd.errors import NotFound

def handle(request, progress):
    {work}
    return {{}}

child.serve(handle)
"""


@pytest.mark.parametrize("work", ["pass", "progress('a part')", "raise NotFound('it is gone')", "raise OSError(5, 'a broken disk')"])
def test_a_child_whose_daemon_has_gone_ends_without_a_word(work: str) -> None:
    argv = [sys.executable, "-c", CHILD.format(work=work)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        child.stdin.write(b"{}\n")
        child.stdin.flush()
        assert child.wait(60) == 0
        assert child.stderr.read() == b""
