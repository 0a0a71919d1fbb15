"""A trajectory with files, a conversation, calls and outputs, made in a sandbox without Python, and what is known of
it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import variety
from tests.e2e.support import Snap

STEPS = 5
AGENT = r"""
use IO::Socket::UNIX;
my $daemon = IO::Socket::UNIX->new("/run/snapshotd/agent.sock") or die;
my $id = 0;
sub ask { print $daemon '{"id":', ++$id, ',', @_, "}\n"; $daemon->flush; my $said = <$daemon>; die $said if $said =~ /"error"/; }
ask('"op":"hello","version":2');
for my $n (1 .. shift) {
    my $call = sprintf '%032x', $n + int rand 1 << 40;
    ask(qq("op":"message","role":"user","content":"question $n"));
    ask(qq("op":"call_begin","call":"$call","name":"write","arguments":{"number":$n}));
    open my $log, '>>', '/workspace/log' or die; print $log "line $n\n"; close $log;
    mkdir "/workspace/d$n"; symlink 'log', "/workspace/link$n"; link '/workspace/log', "/workspace/d$n/same";
    open my $data, '>', "/workspace/data" or die; print $data join('', map { chr int rand 256 } 1 .. 30000); close $data;
    unlink '/usr/bin/seq' if $n == 3;
    ask(qq("op":"call_end","call":"$call","status":"done","exit_code":0,"result":{"answer":$n}));
}
"""
"""A conversation with a call for each question, without Python."""


@dataclass(frozen=True)
class History:
    """A finished trajectory: its id, and its snapshots with what is known of each."""

    trajectory: str
    snapshots: list[str]
    files: dict[str, dict[bytes, variety.Fact]]


def run_agent(snap: Snap, name: str, scratch: Path, steps: int = STEPS) -> History:
    scratch.mkdir(exist_ok=True)
    snap("run", "--runtime", "runc", "--name", name, "--wait", "stored", "--", "perl", "-e", AGENT, str(steps))
    (trajectory,) = [item["id"] for item in snap.json("ls") if item["name"] == name]
    snapshots = [item["id"] for item in snap.json("log", trajectory)]
    assert len(snapshots) >= steps + 1
    return History(trajectory, snapshots, {each: files_of(snap, each, scratch / each) for each in snapshots})


def files_of(snap: Snap, snapshot: str, target: Path) -> dict[bytes, variety.Fact]:
    """The whole root, restored."""
    report = snap.json("restore", snapshot, "--to", target)
    assert report["warnings"] == []
    target.chmod(0o755)
    return variety.manifest(target)


def facts_of(snap: Snap, snapshot: str) -> dict[str, Any]:
    """What two state directories must agree on, but for the files."""
    shown = snap.json("show", snapshot)
    same = {
        key: shown[key] for key in ("id", "parent", "seq", "tool", "message_count", "files", "method", "created_at")
    }
    same["conversation"] = snap.json("show", "--conversation", snapshot)
    same["output"] = {name: snap("show", "--output", name, snapshot).stdout for name in shown["tool"]["outputs"]}
    return same
