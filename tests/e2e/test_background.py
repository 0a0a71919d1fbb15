"""Commands in the background of a sandbox, as a user sees them: they go on beside other calls, without a client, and at
the next daemon."""

from __future__ import annotations

import signal
import urllib.request

import pytest

from snapshotd.client import Command, Sandbox, Snapshotd
from tests.e2e.support import Snap, wait_until

pytestmark = pytest.mark.each_runtime


def sandbox_of(snap: Snap, runtime: str) -> Sandbox:
    box, _ = snap.create("--runtime", runtime)
    return Sandbox.connect(box, client=Snapshotd(snap.state_dir))


def printed(command: Command) -> str:
    """All that it has printed so far."""
    return b"".join(data for _, data in command.output()).decode()


def test_it_goes_on_beside_other_calls_and_ends_with_a_snapshot(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    command = sandbox.exec("echo begun; cat; echo late >&2; echo done > made; exit 3", background=True, stdin=True)
    assert command.info.status == "running"
    wait_until(lambda: printed(command) == "begun\n", "it prints")
    beside = sandbox.exec("echo x > beside")
    assert sandbox.snapshots()[-1].info.method == "copy", "something is alive"
    command.write("some ")
    command.write(b"words\n", end=True)
    result = command.wait()
    assert (result.exit_code, result.stdout, result.stderr) == (3, "begun\nsome words\n", "late\n")
    info = command.info
    assert (info.status, info.exit_code, info.snapshot) == ("failed", 3, result.snapshot_id)
    head = sandbox.head()
    assert head.id == result.snapshot_id != beside.snapshot_id
    assert head.cat("workspace/made") == b"done\n"
    assert head.info.tool.arguments["background"] is True
    assert [one.id for one in sandbox.commands()] == [command.id]
    sandbox.remove(force=True)


COUNT = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True)\n    time.sleep(0.002)\n"


@pytest.mark.timeout(300)
def test_it_goes_on_at_the_next_daemon_and_its_follower_misses_nothing(own_snap: Snap, runtime: str) -> None:
    snap = own_snap
    sandbox = sandbox_of(snap, runtime)
    sandbox.exec(f"cat > /tmp/count.py <<'EOF'\n{COUNT}EOF\necho served > index.html")
    command = sandbox.exec(["python3", "/tmp/count.py"], background=True)
    server = sandbox.exec("exec python3 -u -m http.server 8000", background=True)
    seen, follower = b"", command.output(follow=True)
    for kills in range(1, 4):
        while seen.count(b"\n") < 300 * kills:
            seen += next(follower)[1]
        snap.kill_daemon()
        snap("ls")  # there is a next one
    with sandbox.port(8000) as port:
        wait_until(lambda: b"served" in fetched(port.address), "the server answers at the next daemon")
    again = Sandbox.connect(sandbox.id, client=Snapshotd(snap.state_dir)).command(command.id[:6])
    again.signal(signal.SIGINT)
    for _, data in follower:
        seen += data
    lines = seen.decode().split("Traceback")[0].splitlines()
    assert lines == [str(number) for number in range(len(lines))], "every line once"
    info = command.info
    assert (info.status, info.exit_code) == ("failed", 130)
    assert "GET / HTTP" in printed(server)
    head = sandbox.head()
    assert head.id == info.snapshot
    recorded = b"".join(Snapshotd(snap.state_dir).output(head.id, "stdout")).decode()
    assert recorded.splitlines() == lines, "what is recorded is what was followed"
    server.kill()
    assert server.wait().exit_code == 137
    sandbox.remove(force=True)


def fetched(address: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://{address}/", timeout=30) as answer:
            data: bytes = answer.read()
            return data
    except OSError:
        return b""
