"""`snapshotd-agent`, as a shell script calls it."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from library_rig import Shell

from tests.agent_daemon import FakeDaemon


def test_begin_and_end(daemon: FakeDaemon, server: FakeDaemon, shell: Shell) -> None:
    done = shell("""
        call=$(snapshotd-agent begin "buy food" --arguments '{"n": 1}' --side-effect irreversible --key order-1 --task shop \\
               --compensate '["cancel", "1"]')
        printf 'one\\ntwo' | snapshotd-agent output "$call"
        printf 'oops' | snapshotd-agent output "$call" --stream stderr
        snapshotd-agent end "$call" --result '{"bought": [1]}' --exit-code 0
        other=$(snapshotd-agent begin look)
        printf 'as \\303\\251 text' | snapshotd-agent end "$other" --status failed --error "Type: why" --text - --exit-code 7
        snapshotd-agent end "$other" || echo "again: $?"
        snapshotd-agent end 00000000000000000000000000000000 --exit-code 256 || echo "wrong: $?"
        snapshotd-agent begin look --arguments '{' 2>/dev/null || echo "usage: $?"
    """)
    assert done.stdout.splitlines() == [f"{1:032x}", f"{2:032x}", "again: 1", "wrong: 1", "usage: 2"]
    (first, second) = daemon.calls.values()
    assert (first["name"], first["arguments"], first["status"], first["result"]) == (
        "buy food",
        {"n": 1},
        "done",
        {"bought": [1]},
    )
    request = first["request"]
    assert (request["side_effect"], request["key"], request["task"]) == ("irreversible", "order-1", "shop")
    assert request["compensate"] == {"argv": ["cancel", "1"]}
    assert daemon.outputs[request["call"]] == {"stdout": b"one\ntwo", "stderr": b"oops"}
    assert (second["status"], second["error"], second["result"], second["exit_code"]) == (
        "failed",
        "Type: why",
        "as é text",
        7,
    )
    assert daemon.lost == []


def test_a_large_result_and_calls_at_the_same_time(daemon: FakeDaemon, server: FakeDaemon, shell: Shell) -> None:
    shell("""
        a=$(snapshotd-agent begin a); b=$(snapshotd-agent begin b)
        head -c 3000000 /dev/zero | tr '\\0' x | snapshotd-agent end "$a" --text -
        snapshotd-agent end "$b" --result 5
    """)
    assert [(call["name"], call["result"]) for call in daemon.calls.values()] == [("a", "x" * 3_000_000), ("b", 5)]


def test_a_replay(shell: Shell, socket_path: Path) -> None:
    script = """
        if call=$(snapshotd-agent begin step --arguments '{"n": 1}'); then
            echo ran; snapshotd-agent end "$call" --result '{"answer": 42}' >/dev/null
        else
            echo "$? $call"
        fi
        snapshotd-agent run shell -- sh -c 'echo out; echo err >&2; printf "\\377" >&2; exit 3' || echo "exit $?"
        snapshotd-agent now > time; snapshotd-agent now; cat time
    """
    first = FakeDaemon()
    with first.serving(socket_path):
        before = shell(script, text="")
    second = first.resumed()
    with second.serving(socket_path):
        after = shell(script, text="")
    lines = before.stdout.splitlines()
    assert lines[:3] == ["ran", "out", "exit 3"]
    assert after.stdout.splitlines() == ['10 {"answer": 42}', *lines[1:]]
    assert second.sent("call_end") == []
    assert first.named("shell")[0]["arguments"] == {
        "command": ["sh", "-c", 'echo out; echo err >&2; printf "\\377" >&2; exit 3']
    }
    assert (first.named("shell")[0]["status"], first.named("shell")[0]["exit_code"]) == ("done", 3)
    (streams,) = first.outputs.values()
    assert streams == {"stdout": b"out\n", "stderr": b"err\n\xff"}


def test_approvals(daemon: FakeDaemon, server: FakeDaemon, shell: Shell) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            shell,
            """
            call=$(snapshotd-agent begin pay --arguments '{"n": 1}' --question "Really?" --json)
            echo "$call" | sed 's/"call": "[0-9a-f]*"/"call": "C"/; s/"key": "[0-9a-f]*"/"key": "K"/'
            snapshotd-agent end "$(echo "$call" | sed 's/.*"call": "\\([0-9a-f]*\\)".*/\\1/')" >/dev/null
            snapshotd-agent begin pay --approve || echo "denied: $?"
            snapshotd-agent run pay --approve -- echo paid || echo "denied: $?"
            snapshotd-agent run pay --approve -- echo paid
            snapshotd-agent approve "Sure?" --details '[1]' --expires 60
            snapshotd-agent approve "Sure?" || echo "denied: $?"
        """,
        )
        daemon.decide(daemon.question(), True, arguments={"n": 2})
        for approved, decision in (
            (False, {}),
            (False, {}),
            (True, {"arguments": {"command": ["echo", "less"]}}),
            (True, {"answer": "go"}),
            (False, {"reason": "late"}),
        ):
            daemon.decide(daemon.question(), approved, **decision)
        done = running.result(60)
    assert done.stdout.splitlines() == [
        '{"key": "K", "arguments": {"n": 2}, "call": "C"}',
        "denied: 11",
        "denied: 11",
        "less",
        "go",
        "late",
        "denied: 11",
    ]
    assert len(daemon.named("pay")) == 2


def test_the_mind(daemon: FakeDaemon, server: FakeDaemon, shell: Shell) -> None:
    done = shell("""
        snapshotd-agent message user "hello"
        printf '{"a": 1}' | snapshotd-agent message tool - --json
        snapshotd-agent messages
        snapshotd-agent checkpoint "before it"
        snapshotd-agent state set k '{"n": [1]}'; snapshotd-agent state set gone 1; snapshotd-agent state unset gone
        snapshotd-agent state get k; snapshotd-agent state get; snapshotd-agent state get none || echo "none: $?"
        snapshotd-agent task plan completed; snapshotd-agent task build in-progress --depends plan --note "half way"
        snapshotd-agent task late in-progress --depends build || echo "refused: $?"
        snapshotd-agent tasks
        snapshotd-agent uuid | tr -d 'a-f0-9-'
    """)
    lines = done.stdout.splitlines()
    assert json.loads(lines[0]) == [{"role": "user", "content": "hello"}, {"role": "tool", "content": {"a": 1}}]
    assert lines[1:5] == [f"{1:032x}", '{"n": [1]}', '{"k": {"n": [1]}}', "none: 1"]
    assert lines[5] == "refused: 1"
    assert json.loads(lines[6])[1] == {
        "name": "build",
        "status": "in-progress",
        "depends": ["plan"],
        "note": "half way",
    }
    assert "depends on build" in done.stderr


def test_run_passes_signals_on_and_does_not_wait_for_what_stays_behind(
    daemon: FakeDaemon, server: FakeDaemon, shell: Shell
) -> None:
    done = shell("""
        snapshotd-agent run server -- sh -c 'sleep 60 & echo $!' > pid
        kill "$(cat pid)"
        snapshotd-agent run nothing -- /no/such/command || echo "missing: $?"
        snapshotd-agent run dies -- sh -c 'kill -9 $$' || echo "killed: $?"
        snapshotd-agent run waits -- sh -c 'trap "echo stopped; exit 5" TERM; echo started > started; while :; do sleep 0.05; done' > out &
        until test -e started; do sleep 0.02; done
        kill -TERM $!; wait $! || echo "stopped: $?"; cat out
    """)
    assert done.stdout.splitlines() == ["missing: 127", "killed: 137", "stopped: 5", "stopped"]
    assert [(call["name"], call["status"], call["exit_code"]) for call in daemon.calls.values()] == [
        ("server", "done", 0),
        ("nothing", "failed", 127),
        ("dies", "done", 137),
        ("waits", "done", 5),
    ]


def test_a_holder_ends_with_the_daemon(server: FakeDaemon, shell: Shell, socket_path: Path) -> None:
    call = shell("snapshotd-agent begin work", SNAPSHOTD_RECONNECT_S="0").stdout.strip()
    assert f"@snapshotd-call-{call}" in Path("/proc/net/unix").read_text()
    server.close()
    socket_path.touch()  # where a daemon was: this is a sandbox
    done = shell(f"snapshotd-agent end {call}", check=False)
    assert done.returncode in (1, 69)  # nobody holds it any more; or the holder was about to find out


def test_a_holder_holds_nothing_of_whoever_started_it(server: FakeDaemon, shell: Shell, tmp_path: Path) -> None:
    call = shell("exec 7<json.py; snapshotd-agent begin work").stdout.strip()
    (inode,) = [
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(f"@snapshotd-call-{call}")
    ]
    holders = [fds.parent for fds in Path("/proc").glob("[0-9]*/fd") if f"socket:[{inode}]" in _targets(fds)]
    (holder,) = holders
    assert os.readlink(holder / "cwd") == "/"
    assert all(target == "/dev/null" or not target.startswith("/") for target in _targets(holder / "fd"))
    assert os.getsid(int(holder.name)) not in (os.getsid(0), 0)
    assert holder.name != str(os.getpid())
    os.kill(int(holder.name), signal.SIGHUP)  # as when its terminal goes
    assert shell(f"snapshotd-agent end {call}").returncode == 0


def _targets(fds: Path) -> list[str]:
    try:
        return [os.readlink(fds / name) for name in os.listdir(fds)]
    except OSError:
        return []  # it has just ended


def test_outside_of_a_sandbox(shell: Shell, tmp_path: Path) -> None:
    done = shell(
        """
        call=$(snapshotd-agent begin work --key k --json); echo "$call" | sed 's/.*"key"/"key"/'
        snapshotd-agent end 0123 && snapshotd-agent run x -- sh -c 'echo ran; exit 4' || echo "exit $?"
        echo piped | snapshotd-agent output 0123
        snapshotd-agent run x --approve -- echo ran || echo "denied: $?"
        snapshotd-agent checkpoint name
    """,
        SNAPSHOTD_AGENT_SOCKET=str(tmp_path / "none"),
    )
    assert done.stdout.splitlines() == ['"key": "k"}', "ran", "exit 4", "denied: 11"]


def test_a_sandbox_whose_daemon_is_away(shell: Shell, library: Path) -> None:
    done = shell(
        "snapshotd-agent begin work",
        check=False,
        SNAPSHOTD_AGENT_SOCKET=str(library / "agent.sock"),
        SNAPSHOTD_RECONNECT_S="0.1",
    )
    assert done.returncode == 69
    assert "cannot be reached" in done.stderr
    assert " for 0.1 s " in done.stderr
