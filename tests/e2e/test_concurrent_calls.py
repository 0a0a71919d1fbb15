"""Calls of one sandbox may overlap: no command ever meets a root that is being switched under it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from snapshotd.client import Snapshotd
from tests.e2e.support import Snap


def test_overlapping_commands_all_work_and_each_gets_its_snapshot(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)

    def calls(worker: int) -> list[str]:
        seen = []
        for number in range(12):
            output: list[bytes] = []
            done = client.exec(
                trajectory,
                ["sh", "-c", f"mkdir -p w{worker} && cd w{worker} && echo {number} > f && cat f"],
                on_output=lambda _, data, output=output: output.append(data),
            )
            assert (done.exit_code, b"".join(output)) == (0, f"{number}\n".encode())
            assert done.snapshot is not None
            seen.append(done.snapshot.id)
        return seen

    with ThreadPoolExecutor(4) as pool:
        snapshots = [snapshot for seen in pool.map(calls, range(4)) for snapshot in seen]
    assert len(set(snapshots)) == 48
    log = snap.json("log", trajectory)
    assert {s["id"] for s in log} >= set(snapshots)
    assert [s["parent"] for s in log[1:]] == [s["id"] for s in log[:-1]]
    assert snap.sh(trajectory, "cat w*/f")["stdout"] == "11\n" * 4
    snap("rm", "--force", trajectory)
