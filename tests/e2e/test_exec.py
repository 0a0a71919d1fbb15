"""`exec` as a user sees it: who runs the command."""

from __future__ import annotations

from tests.e2e.support import Snap


def test_a_command_runs_as_a_user_named_in_the_sandbox(snap: Snap, runtime: str) -> None:
    trajectory, _ = snap.create("--runtime", runtime)
    snap.sh(trajectory, "echo worker:x:4321:4322::/home/worker:/bin/sh >> /etc/passwd")
    snap.sh(trajectory, "echo extra:x:77: >> /etc/group; echo more:x:78:a,worker >> /etc/group")
    look = ("--", "sh", "-c", "id -u; id -g; id -G; echo $HOME")

    def seen(user: str, *place: str) -> list[str]:
        return snap("exec", "-u", user, *(place or (trajectory,)), *look).stdout.split("\n")[:-1]

    assert seen("worker") == seen("4321") == ["4321", "4322", "4322 78", "/home/worker"]
    assert seen("worker:extra") == ["4321", "77", "77", "/home/worker"]
    assert seen("4000:78") == ["4000", "78", "78", "/"]
    assert seen("nobody")[0] == "65534"
    assert seen("root")[0] == "0"
    head = snap.json("log", trajectory)[-1]["id"]
    assert seen("worker", "--snapshot", head) == seen("worker")

    before = len(snap.json("log", trajectory))
    for user, words in (("stranger", "stranger"), ("worker:strangers", "strangers"), (":extra", ":extra"), ("99999999999", "99999999999")):
        refused = snap("exec", "-u", user, trajectory, "--", "true", code=125).stderr
        assert refused.startswith("snapshotd: "), refused
        assert words in refused, refused
    snap.sh(trajectory, "ln -sf /proc/self/environ /etc/group; rm /etc/passwd; ln -s /dev/tty /etc/passwd")
    assert "/etc/passwd" in snap("exec", "-u", "worker", trajectory, "--", "true", code=125).stderr
    assert len(snap.json("log", trajectory)) == before + 1, "a command that never ran leaves no snapshot"
    snap("rm", "--force", trajectory)
