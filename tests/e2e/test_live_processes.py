"""A sandbox with live processes is captured by copying, without disturbing them."""

from __future__ import annotations

import pytest

from tests import way
from tests.e2e.support import Snap, wait_until

SERVER = r"""
import http.server, threading, sys
class Handler(http.server.BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        with open("/workspace/hits", "a") as f:
            f.write(f"{Handler.count}\n")
        self.send_response(200); self.end_headers(); self.wfile.write(str(Handler.count).encode())
        print("served", Handler.count, flush=True)
    def log_message(self, *args): pass
log = open("/workspace/server.log", "w")
print("up", file=log, flush=True)
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""
GET = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/', timeout=60).read().decode())"


def test_a_server_serves_on_across_snapshots_and_its_forks_are_consistent(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, f"cat > server.py <<'EOF'\n{SERVER}\nEOF\npython3 server.py & echo $! > pid")
    wait_until(lambda: snap.sh(trajectory, "cat server.log", code=None)["stdout"] == "up\n", "the server is up")
    snapshots = []
    for number in range(1, 11):
        done = snap.sh(trajectory, f'python3 -c "{GET}"; echo {number} > step; mkdir d{number}; rm -rf d{number - 1}')
        assert done["stdout"] == f"{number}\n"
        snapshots.append(done["snapshot"])
    assert [snap.json("show", s)["method"] for s in snapshots] == [way.COPY] * 10
    for number, snapshot in ((3, snapshots[2]), (10, snapshots[9])):
        (fork,) = snap.json("fork", snapshot)["trajectories"]
        seen = snap.sh(
            fork,
            "cat step; wc -l < hits; ls -d d*; cat server.log; cat /proc/[0-9]*/comm | grep python || echo not running",
        )
        assert seen["stdout"] == f"{number}\n{number}\nd{number}\nup\nnot running\n"
        snap("rm", "--force", fork)
    snap.sh(trajectory, "kill $(cat pid)")
    wait_until(
        lambda: snap.sh(trajectory, "echo q >> quiet")["exit_code"] == 0 and _last(snap, trajectory) == way.PIVOT,
        "quiet again",
    )
    assert snap.sh(trajectory, "cat step; wc -l < hits; ls -d d*")["stdout"] == "10\n10\nd10\n"
    snap("rm", "--force", trajectory)


def _last(snap: Snap, trajectory: str) -> str:
    method: str = snap.json("show", trajectory)["method"]
    return method


@pytest.mark.each_runtime
def test_a_shared_mapping_is_captured_although_its_ctime_stands_still(snap: Snap, runtime: str) -> None:
    writer = (
        "import mmap, time, os; f = open('m', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); m[0:1] = b'a'; m.flush()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "m[0:1] = b'b'; open('went', 'w').close(); time.sleep(1000)"
    )
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, f'python3 -c "{writer}" & until grep -qs a m; do :; done')
    before = snap.sh(trajectory, "head -c1 m")["snapshot"]
    after = snap.sh(trajectory, "touch go; while [ ! -e went ]; do :; done; true")["snapshot"]
    assert snap("cat", f"{before}:/workspace/m").stdout[0] == "a"
    assert snap("cat", f"{after}:/workspace/m").stdout[0] == "b"
    snap("rm", "--force", trajectory)


@pytest.mark.each_runtime
def test_output_of_a_background_process_does_not_hold_a_call_up(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    done = snap.sh(trajectory, "(while :; do echo noise; sleep 0.05; done) & echo started")
    assert done["stdout"].startswith("started\n") or "started\n" in done["stdout"]
    assert snap.sh(trajectory, "echo alive")["stdout"] == "alive\n"
    snap("rm", "--force", trajectory)
