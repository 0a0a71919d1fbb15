"""What a user's shell does to a command: it gives it an input, stops to read its output, or ends it."""

from __future__ import annotations

import hashlib

from tests.e2e.support import Snap


def test_all_of_a_long_output_is_followed(snap: Snap) -> None:
    line, count = b"0123456789" * 100, 300_000  # more than the events of a run hold
    script = f"import sys\nfor n in range({count}): sys.stdout.write('%06d' % n + {line.decode()!r})\nprint('end', file=sys.stderr)"
    trajectory = snap("run", "--detach", "--runtime", "runc", "--", "python3", "-c", script).stdout.strip()
    wanted = hashlib.sha256()
    for number in range(count):
        wanted.update(b"%06d" % number + line)
    attached = snap.start("attach", "-q", trajectory)
    assert attached.stdout is not None
    found = hashlib.file_digest(attached.stdout.buffer, "sha256")  # type: ignore[attr-defined]
    assert found.hexdigest() == wanted.hexdigest()
    assert attached.communicate()[1] == "end\n"
    assert attached.returncode == 0
