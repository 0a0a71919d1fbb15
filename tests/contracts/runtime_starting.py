"""Runtime contract: a command that the starter starts cannot be told from one that `runc exec` starts, and its start
gives a sandbox nothing of the host."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from snapshotd.engine.sandbox.quiesce import is_zombie
from snapshotd.errors import CommandNotFound, CommandNotRunnable, SandboxFailed
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.processes import in_own_namespace, is_ending, stat_fields
from snapshotd.runtime import starter
from snapshotd.runtime._pattern import Pattern
from snapshotd.runtime.base import Container
from snapshotd.runtime.starter import Starter
from tests.contracts.runtime_rig import DEADLINE_S, Rig, namespace, read_all
from tests.keeper_rig import eventually

_PROBE = r"""
use POSIX;
sub slurp { open(my $f, "<", $_[0]) or return "error $!"; local $/; my $t = <$f>; return defined $t ? $t : "" }
my %own = map { $_ => 1 } qw(Tgid Pid SigQ NSpid NStgid NSpgid NSsid Kthread voluntary_ctxt_switches nonvoluntary_ctxt_switches);
for (split /\n/, slurp("/proc/self/status")) { my ($name) = split /:/; print "$_\n" unless $own{$name} or /^(Vm|Rss|HugetlbPages|FDSize)/ }
my @stat = split / /, (slurp("/proc/self/stat") =~ /.*\) (.*)/s)[0];
print "leads ", ($stat[2] == $$ ? 1 : 0), ($stat[3] == $$ ? 1 : 0), " parent $stat[1] tty $stat[4] nice $stat[16] policy $stat[38]\n";
printf "umask %o groups %s\n", umask, $);
for (qw(limits cgroup oom_score_adj loginuid sessionid timerslack_ns personality mountinfo environ cmdline attr/current
        coredump_filter setgroups uid_map gid_map io_uring)) { print "$_: ", slurp("/proc/self/$_"), "\n" }
for (glob("/proc/self/ns/*"), "/proc/self/cwd", "/proc/self/root", "/proc/self/exe") { print "$_ ", (readlink($_) || $!), "\n" }
for my $fd (0..200) { my $to = readlink("/proc/self/fd/$fd"); next unless defined $to; $to =~ s/\[\d+\]//; print "fd $fd $to\n" }
print "cpus ", slurp("/sys/fs/cgroup/cpuset.cpus.effective"), " signals ";
for my $n (1..64) { my $old = POSIX::SigAction->new; POSIX::sigaction($n, undef, $old); print $old->{HANDLER} || "?", " " }
"""


def _twice(rig: Rig, look: Callable[[], object]) -> tuple[object, object]:
    """What is seen of a command of the starter, and of runc."""
    here = look()
    with rig.by_runc():
        return here, look()


def check_a_command_looks_as_by_runc(rig: Rig) -> None:
    """Capabilities, filter, no-new-privileges, ids, groups, cgroup, descriptors, environment, limits, OOM score, what
    /proc shows, session and process group, signals."""
    with rig.used_container() as container:
        rig.shell(container, "mkdir -p /workspace /closed; chmod 700 /closed")
        for who in (
            {},
            {"user": 1000, "group": 1001, "groups": (5, 1002)},
            {"user": 7, "cwd": "/closed"},
            {"stdin": True},
        ):
            env = {"PATH": "/usr/bin:/bin", "HOME": "/root", "WITH": "a=b\nc", "EMPTY": ""}

            def look(options: dict[str, object] = {"cwd": "/workspace", "env": env, **who}) -> list[str]:  # noqa: B006
                process = rig.start(container, "perl", "-e", _PROBE, **options)
                if process.stdin_fd is not None:
                    os.close(process.stdin_fd)
                out, err = read_all([process.stdout_fd, process.stderr_fd])
                os.close(process.stdout_fd)
                os.close(process.stderr_fd)
                assert process.wait(DEADLINE_S) == 0, err
                return out.decode().splitlines()

            by_starter, by_runc = _twice(rig, look)
            assert by_starter == by_runc, set(by_starter) ^ set(by_runc)  # type: ignore[call-overload]
            assert any("Seccomp:\t2" in line for line in by_starter)  # type: ignore[attr-defined]


def check_a_terminal_looks_as_by_runc(rig: Rig) -> None:
    """The same, and the size, of a command with a terminal."""
    size = r'my $s = "x" x 8; ioctl(STDIN, 0x5413, $s); print "size ", join(" ", unpack("SS", $s)), "\n";'
    with rig.used_container() as container:
        for user in (0, 1000):

            def look(user: int = user) -> list[str]:
                process = rig.start(container, "perl", "-e", size + _PROBE, terminal=(21, 43), user=user, group=user)
                assert process.terminal
                said = b""
                with contextlib.suppress(OSError):  # EIO: the end
                    while data := os.read(process.stdout_fd, 1 << 16):
                        said += data
                for fd in (process.stdin_fd, process.stdout_fd, process.stderr_fd):
                    assert fd is not None
                    os.close(fd)
                assert process.wait(DEADLINE_S) == 0
                return said.decode().split("\r\n")

            by_starter, by_runc = _twice(rig, look)
            assert by_starter == by_runc, set(by_starter) ^ set(by_runc)  # type: ignore[call-overload]
            assert "size 21 43" in by_starter  # type: ignore[operator]


_STATUS_OF_ONE = (
    "Tgid",
    "Pid",
    "FDSize",
    "NSpid",
    "NStgid",
    "NSpgid",
    "NSsid",
    "SigQ",
    "Vm",
    "Rss",
    "voluntary",
    "nonvol",
)
_USE = re.compile(r"usage|stat|failcnt|procs|tasks|threads|pressure|event|slabinfo|peak|current|blkio|time")
"""Files of a cgroup that tell of its use, not of its limits."""


def check_a_sandbox_looks_as_by_runc(rig: Rig) -> None:
    """One that the starter makes: its mounts, devices, namespaces, cgroups, filter, loopback, and all that /proc says of
    its init."""
    if rig.runtime.name != "runc":
        return
    rig.runtime.destroy(rig.runtime.create(rig.spec()).id)  # the pattern of the others
    kept = rig.runtime.create(rig.spec())  # so that what they share is there

    def look() -> tuple[bool, dict[str, object]]:
        container = rig.runtime.create(rig.spec())
        eventually(lambda: _waits(container), "the init is not ready")
        try:
            return bool(_residents(container)), {**_seen(container), "filters": _filters(container)}
        finally:
            rig.runtime.destroy(container.id)

    try:
        by_starter, by_runc = _twice(rig, look)
    finally:
        rig.runtime.destroy(kept.id)
    (was_starter, one), (was_runc, other) = by_starter, by_runc  # type: ignore[misc]
    assert (was_starter, was_runc) == (rig.with_user_namespaces, False)
    different = {what: (one.get(what), other.get(what)) for what in one.keys() | other.keys()}
    different = {what: pair for what, pair in different.items() if pair[0] != pair[1]}
    assert not different, different


def check_devices_are_filtered(rig: Rig) -> None:
    """For a process of the host, too, that is in a sandbox's cgroup: with runc's rules, whoever made the sandbox."""
    entering = 'for door in "$@"; do echo 0 > "$door" || exit 99; done; '
    with rig.container(), rig.container() as other:  # the second is the starter's, where it makes sandboxes
        doors = [f"{place}/cgroup.procs" for place in _cgroup_places(other)]
        for device, expected in (("/dev/null", 0), ("/dev/kmsg", 1)):
            script = f"{entering}exec 2>&1; head -c0 {device}"
            done = subprocess.run(["sh", "-c", script, "sh", *doors], capture_output=True, text=True, check=False)
            assert done.returncode == expected, done
            assert expected == 0 or "Operation not permitted" in done.stdout, done


def _cgroup_places(container: Container) -> list[Path]:
    """The directories of its cgroups, in all hierarchies."""
    paths = {line.split(":", 2)[2] for line in Path(f"/proc/{container.pid}/cgroup").read_text().splitlines()}
    places = [Path(f"{point}{path}") for point in cgroup.hierarchies() for path in paths if path != "/"]
    return [place for place in places if place.is_dir()]


def _waits(container: Container) -> bool:
    """True if the init has blocked the signals that it waits for, and waits."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{container.pid}/status").read_text().splitlines())
    return status["State"].startswith("S") and int(status["SigBlk"], 16) != 0


def _filters(container: Container) -> object:
    """Asked of a starter of its own: the rig's may be switched off."""
    asked = Starter()
    try:
        resident = asked.enter(container, container.id)
        return resident and resident.filters
    finally:
        asked.close()


def _seen(container: Container) -> dict[str, object]:
    proc = Path(f"/proc/{container.pid}")

    def text(name: str) -> str:
        try:
            return (proc / name).read_text().replace(container.id, "ID").replace(str(container.pid), "PID")
        except OSError as exc:
            return str(exc.strerror)

    names = "limits cgroup oom_score_adj uid_map gid_map setgroups environ cmdline loginuid sessionid timerslack_ns personality"
    found: dict[str, object] = {
        name: text(name) for name in f"{names} attr/current coredump_filter net/fib_trie net/dev".split()
    }
    found["status"] = [line for line in text("status").splitlines() if not line.startswith(_STATUS_OF_ONE)]
    found["mounts"] = _mounts_of(text("mountinfo"))
    found["fds"] = [os.readlink(proc / "fd" / name) for name in ("0", "1", "2")]
    found["fd count"] = len(os.listdir(proc / "fd"))
    found["links"] = [os.readlink(proc / name).replace(container.id, "ID") for name in ("cwd", "root", "exe")]
    found["own namespaces"] = [
        kind for kind in sorted(os.listdir(proc / "ns")) if namespace(container.pid, kind) != namespace("self", kind)
    ]
    for directory, _, files in os.walk(proc / "root" / "dev"):
        for path in (Path(directory), *(Path(directory) / name for name in files)):
            about = path.lstat()
            link = os.readlink(path) if path.is_symlink() else ""
            owner = [one if _is_inside(container, one) else "nobody" for one in (about.st_uid, about.st_gid)]
            found[str(path.relative_to(proc))] = about.st_mode, owner, about.st_rdev, link
    for hierarchy in cgroup.hierarchies():
        for file in Path(hierarchy).glob(f"snapshotd-*/{container.id}/*"):
            if not _USE.search(file.name):
                with contextlib.suppress(OSError):  # it is for writing only
                    found[f"{hierarchy}/{file.name}"] = file.read_text()
    return found


def _is_inside(container: Container, host_id: int) -> bool:
    """True if a user or group of the host has a number in the container."""
    known = container.id_map
    return known is None or known.base <= host_id < known.base + known.count


def _mounts_of(mountinfo: str) -> list[str]:
    """The lines, each mount and each file system without a device by its number in the list."""
    lines = [line.split() for line in mountinfo.splitlines()]
    ids, devices = [line[0] for line in lines], list(dict.fromkeys(line[2] for line in lines))
    return [
        f"{ids.index(line[1]) if line[1] in ids else -1} {devices.index(line[2])} {' '.join(line[3:])}"
        for line in lines
    ]


def check_a_sandbox_that_the_starter_cannot_make_is_made_by_runc(rig: Rig) -> None:
    """Nothing is left of the attempt, whichever step fails."""
    if rig.runtime.name != "runc":
        return
    order, before = Pattern.order, _dead_starters()
    with rig.container(), rig.container():  # the pattern, and one like it
        for name, wrong in (("owner", -5), ("filters", [["AAAA", 0]])):
            with (
                mock.patch.object(Pattern, "order", lambda *args, n=name, w=wrong: {**order(*args), n: w}),
                rig.container() as container,
            ):
                assert _is_made_by_runc(rig, container), name
                assert rig.shell(container, "echo runs") == "runs\n"
        make = cgroup.Cgroup.make

        def half_made(group: cgroup.Cgroup, settings: cgroup.GroupSettings) -> None:
            make(group, settings)
            raise OSError(errno.EINVAL, "refused")

        with mock.patch.object(cgroup.Cgroup, "make", half_made), rig.container() as container:
            assert _is_made_by_runc(rig, container), "the cgroup is refused"
        with (
            rig.container(),
            mock.patch.object(starter, "write_map", side_effect=PermissionError),
            rig.container() as last,
        ):
            assert _is_made_by_runc(rig, last), "the map is refused"
    assert _dead_starters() == before


def _is_made_by_runc(rig: Rig, container: Container) -> bool:
    """The starter gets the configuration without a file."""
    return (rig.work / "runc/bundles" / container.id / "config.json").exists()


def _dead_starters() -> set[int]:
    """Processes that the starter cloned for this one, which have ended and which it has not waited for."""
    return {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_dead_starter(pid)}


def _is_dead_starter(pid: int) -> bool:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return name.endswith("(starter") and rest.split()[:2] == ["Z", str(os.getpid())]
    except OSError:
        return False


def check_a_command_that_cannot_run_is_refused_as_by_runc(rig: Rig) -> None:
    with rig.used_container() as container:
        rig.shell(
            container,
            "echo text > /text; printf '#!/no/such\\n' > /lost; chmod 755 /lost; mkdir -m 700 /closed; ln -s / /up",
        )
        for argv, options in (
            (["no-such"], {}),
            (["/no/such"], {}),
            (["/text/x"], {}),
            (["/text"], {}),
            (["/lost"], {}),
            (["true"], {"cwd": "/no/such"}),
            (["true"], {"cwd": "/text"}),
            (["true"], {"env": {"PATH": "relative:", "HOME": "/"}}),
            (["true"], {"env": {"HOME": "/"}}),
            (["true", "x" * 140_000], {}),
        ):

            def look(argv: list[str] = argv, options: dict[str, object] = options) -> str:  # type: ignore[assignment]
                try:
                    return str(rig.run(container, *argv, **options).code)
                except (CommandNotFound, CommandNotRunnable) as exc:
                    return f"{type(exc).__name__}: {exc}"

            by_starter, by_runc = _twice(rig, look)
            assert by_starter == by_runc, argv
        with contextlib.suppress(CommandNotRunnable):
            rig.run(container, "/usr")
            raise AssertionError("a directory was run")


def check_a_start_shows_nothing_of_the_host(rig: Rig) -> None:
    """A process in the sandbox looks at every new process while many are started, and one tries what lies under their
    descriptors."""
    watch = r"""
    $| = 1; print "ready\n"; my %seen;
    while (!-e "/tmp/stop") {
        for my $pid (grep { $_ ne $$ and $_ != 1 } map { m,/proc/(\d+)$, ? $1 : () } glob("/proc/[0-9]*")) {
            for my $what (qw(environ maps mem)) {
                next unless open(my $f, "<", "/proc/$pid/$what");
                my $text; sysread($f, $text, 4096);
                $seen{"$what of python"} = 1 if defined $text and $text =~ /python|snapshotd/i;
            }
            for my $what ("exe", "cwd", "root", map { "fd/$_" } 0..120) {
                my $to = readlink("/proc/$pid/$what"); next unless defined $to;
                $seen{"$what is $to"} = 1 if $to =~ /python|snapshotd|memfd|socket|\/proc\//;
            }
        }
    }
    print join("\n", keys %seen), "\n";
    """
    with rig.container() as container:
        process = rig.start(container, "perl", "-e", watch)
        assert os.read(process.stdout_fd, 6) == b"ready\n"
        for number in range(40):
            assert rig.run(container, "true", cwd=("/", "/tmp")[number % 2], user=number % 2).code == 0
        rig.run(container, "touch", "/tmp/stop")
        out, _ = read_all([process.stdout_fd, process.stderr_fd])
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)
        assert process.wait(DEADLINE_S) == 0
        assert out.decode().strip() == ""
        for number in (3, 4, 5, 6, 7, 8, 9, 10, 100, 101, 102, 103):
            for place in (f"/proc/self/fd/{number}", f"/proc/self/fd/{number}/../../bin/true"):
                with contextlib.suppress(CommandNotFound, CommandNotRunnable):
                    assert rig.run(container, place).code != 0, place
                    raise AssertionError(f"{place} could be run")
            with contextlib.suppress(CommandNotFound, CommandNotRunnable):
                rig.run(container, "true", cwd=f"/proc/self/fd/{number}")
                raise AssertionError(f"descriptor {number} is a directory")


def check_the_hosts_interpreter_cannot_be_changed(rig: Rig) -> None:
    """A script whose interpreter is /proc/self/exe runs the program that starts commands. It lies on a mount of its own
    that is read-only, so nobody who keeps hold of it can write it later (CVE-2019-5736)."""
    with rig.container() as container:
        rig.shell(container, "true")
        starters = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_starter(pid)]
        assert starters
        for pid in starters:
            program = os.open(f"/proc/{pid}/exe", os.O_PATH | os.O_CLOEXEC)
            try:
                assert os.fstatvfs(program).f_flag & os.ST_RDONLY
            finally:
                os.close(program)


def _is_starter(pid: int) -> bool:
    """True for a starter that this process has made."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and b"starting/main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def check_a_sandbox_cannot_reach_its_resident(rig: Rig) -> None:
    """The process that starts a sandbox's commands is in its cgroups, is none of its processes, and outlives a signal to
    all of them."""
    with rig.container() as container:
        rig.runtime.prepare(container)
        (resident,) = _residents(container)
        assert cgroup.of_process(container.pid).processes() == [container.pid]
        names = rig.shell(container, "cat /proc/[0-9]*/comm; kill -9 -1; true").split()
        assert names == ["init", "sh"]
        assert rig.run(container, "true").code == 0
        assert _residents(container) == {resident}


def check_a_resident_that_is_killed_is_made_again(rig: Rig) -> None:
    with rig.container() as container:
        rig.shell(container, "true")
        (resident,) = _residents(container)
        os.kill(resident, signal.SIGKILL)
        eventually(lambda: not _residents(container), "the resident does not end")
        assert rig.shell(container, "echo again") == "again\n"
        assert len(_residents(container)) == 1
        assert not os.path.exists(f"/proc/{resident}")


def check_a_resident_ends_with_its_sandbox(rig: Rig) -> None:
    """Also where a sandbox ends by itself: a cgroup with a member could not be removed."""
    with rig.container() as container:
        rig.shell(container, "true")
        (resident,) = _residents(container)
        os.kill(container.pid, signal.SIGKILL)
        eventually(lambda: is_zombie(resident), "the resident does not end")
        with contextlib.suppress(SandboxFailed):
            rig.start(container, "true")
            raise AssertionError("a command was started")
    assert not os.path.exists(f"/proc/{resident}")


def check_a_destroyed_sandbox_leaves_no_descriptor(rig: Rig) -> None:
    """Without the garbage collector, which comes when it likes: a daemon destroys a sandbox for each fork."""
    with rig.container() as container:  # makes what stays: the starter's own connection
        rig.shell(container, "true")
    gc.collect()
    before = _descriptors()
    gc.disable()
    try:
        with rig.container() as container:
            rig.shell(container, "true")
            assert len(_residents(container)) == 1
        after = _descriptors()
        assert after == before, (before.items() - after.items(), after.items() - before.items())
    finally:
        gc.enable()


def _descriptors() -> dict[str, str]:
    """The test process's open descriptors, with what each leads to. Connections to the Docker engine are left out: its
    SDK keeps one open for each of the last 25 addresses that it asked."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            if not _leads_to_the_engine(int(name)):
                found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _leads_to_the_engine(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd)) as one, contextlib.suppress(OSError):  # it may be a listener
        return str(one.getpeername()).endswith("docker.sock")
    return False


def check_residents_are_bounded(rig: Rig) -> None:
    """The least recently used one ends, and is made again when it is needed."""
    with mock.patch.object(starter, "_RESIDENTS_MAX", 1), rig.container() as one, rig.container() as other:
        for first, second in ((one, other), (other, one)):
            rig.shell(first, "true")
            assert len(_residents(first)) == 1
            rig.shell(second, "true")
            eventually(lambda first=first: not _residents(first), "the resident does not end")  # type: ignore[misc]


def _residents(container: Container) -> set[int]:
    """The processes in a container's cgroup that are none of its own."""
    group = cgroup.of_process(container.pid)
    return {pid for pid in group.members() if in_own_namespace(pid) and not is_zombie(pid)}


def check_a_sandbox_that_is_ending_takes_no_command(rig: Rig) -> None:
    """Its init ends when the last of its processes is reaped, which nobody does while a start is under way: that may
    not wait for the init."""
    with rig.container() as container, ThreadPoolExecutor(1) as pool:
        last = rig.start(container, "true")
        os.close(last.stdout_fd)
        os.close(last.stderr_fd)
        eventually(lambda: stat_fields(last.pid)[0] == b"Z", "the command has not ended")
        rig.forget(container)
        os.kill(container.pid, signal.SIGKILL)
        eventually(lambda: is_ending(stat_fields(container.pid)), "the init lives")
        assert stat_fields(container.pid)[0] != b"Z", "the command was reaped"
        with pytest.raises(SandboxFailed):
            pool.submit(rig.start, container, "true").result(DEADLINE_S)


CHECKS = (
    check_a_sandbox_that_is_ending_takes_no_command,
    check_a_sandbox_looks_as_by_runc,
    check_a_sandbox_that_the_starter_cannot_make_is_made_by_runc,
    check_a_sandbox_cannot_reach_its_resident,
    check_a_resident_that_is_killed_is_made_again,
    check_a_resident_ends_with_its_sandbox,
    check_a_destroyed_sandbox_leaves_no_descriptor,
    check_residents_are_bounded,
    check_a_command_looks_as_by_runc,
    check_a_terminal_looks_as_by_runc,
    check_a_command_that_cannot_run_is_refused_as_by_runc,
    check_a_start_shows_nothing_of_the_host,
    check_the_hosts_interpreter_cannot_be_changed,
)
