"""Runtime contract: namespaces, limits, privileges, system calls, files and network of a container."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapshotd.runtime.base import CAPABILITIES, RUN_DIR, SHARE_DIR, Container
from snapshotd.types import IdMap, Limits, Network
from tests.contracts.runtime_rig import DEADLINE_S, Rig, namespace, namespace_owner

_CAPABILITY_NUMBERS = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_BIND_SERVICE": 10,
    "CAP_SYS_CHROOT": 18,
    "CAP_SETFCAP": 31,
}


def check_namespaces(rig: Rig) -> None:
    with rig.used_container() as container:
        for kind in ("pid", "mnt", "uts", "ipc", "net", "cgroup"):
            assert namespace(container.pid, kind) != namespace("self", kind), kind
        assert (namespace(container.pid, "user") != namespace("self", "user")) == (container.id_map is not None)
        assert rig.shell(container, "cat /proc/sys/kernel/hostname") == "sandbox\n"
        assert _id_map(container) == container.id_map
        assert rig.shell(container, "echo $$; cat /proc/1/comm").split()[1] in ("init", "catatonit", "exe")


def check_rename(rig: Rig) -> None:
    """Also where an engine keeps the name in files. Another container keeps its own."""
    with rig.container() as container, rig.container() as other:
        files = "cat /proc/sys/kernel/hostname; cat /etc/hostname /etc/hosts 2>/dev/null || true"
        assert "sandbox" in rig.shell(container, files).split()
        rig.runtime.rename(container, "sandbox-0123456789ab")
        words = rig.shell(container, files).split()
        assert words[0] == "sandbox-0123456789ab"
        assert "sandbox" not in words
        assert rig.shell(other, "cat /proc/sys/kernel/hostname") == "sandbox\n"


def _id_map(container: Container) -> IdMap | None:
    inside, outside, count = (int(word) for word in Path(f"/proc/{container.pid}/uid_map").read_text().split())
    return None if (inside, outside) == (0, 0) and count == 2**32 - 1 else IdMap(outside, count)


def check_what_is_counted_by_user_is_not_roots(rig: Rig) -> None:
    """With ids of its own, a container takes nothing of what the kernel counts for root of the host, or for another
    container."""
    with rig.container() as one, rig.container() as other:
        if one.id_map is None:
            return
        assert rig.shell(one, "echo ok") == "ok\n"
        assert _keys_of(one.id_map.base) == 0
        owners = {namespace_owner(one.pid), namespace_owner(other.pid)}
        assert len(owners) == 2, owners
        assert all(not 0 <= owner - one.id_map.base < one.id_map.count and owner != 0 for owner in owners), owners


def _keys_of(user: int) -> int:
    """How many kernel keys count for a user of the host (keyrings of containers, which may have 200 together)."""
    rows = [line.split() for line in Path("/proc/key-users").read_text().splitlines()]
    return sum(int(row[3].split("/")[0]) for row in rows if row[0] == f"{user}:")


def check_limits_are_set(rig: Rig) -> None:
    with rig.used_container() as container:
        values = _cgroup_values(container.pid)
    assert values["memory"] == 256 << 20, values
    assert values["pids"] == 64, values
    assert values["cpu"] == 0.5, values
    assert values["swap"] in (0, None), values


def _cgroup_values(pid: int) -> dict[str, float | None]:
    """The limits that the kernel has for the cgroup of `pid`, both versions alike. `swap` is None where it is not
    counted."""
    paths: dict[str, Path] = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = Path(f"/sys/fs/cgroup/{controller}{path}")
    if "memory" in paths:
        quota, period = (int((paths["cpu"] / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        memory = int((paths["memory"] / "memory.limit_in_bytes").read_text())
        both = paths["memory"] / "memory.memsw.limit_in_bytes"
        swap = int(both.read_text()) - memory if both.exists() else None
        return {
            "memory": memory,
            "swap": swap,
            "cpu": quota / period,
            "pids": int((paths["pids"] / "pids.max").read_text()),
        }
    unified = paths[""]
    quota, period = (int(word) for word in (unified / "cpu.max").read_text().split())
    swap_file = unified / "memory.swap.max"
    return {
        "memory": int((unified / "memory.max").read_text()),
        "swap": int(swap_file.read_text()) if swap_file.exists() else None,
        "cpu": quota / period,
        "pids": int((unified / "pids.max").read_text()),
    }


def check_pids_limit_holds(rig: Rig) -> None:
    """A fork bomb ends at the limit; the container stays usable."""
    with rig.used_container() as container:
        script = 'for my $i (1..200) { my $p = fork(); if (!defined $p) { print "stopped at $i\\n"; last } if (!$p) { sleep 1000; exit } } '
        output = rig.run(container, "perl", "-e", script + "kill 9, -$$;")
        assert b"stopped at" in output.stdout or output.code == 137, output
        assert rig.shell(container, "echo ok") == "ok\n"


def check_memory_limit_holds(rig: Rig) -> None:
    with rig.container(limits=Limits(memory_bytes=64 << 20, cpus=1, pids=64)) as container:
        output = rig.run(container, "perl", "-e", "my $x = 'x' x (200 << 20); print length($x)")
        assert output.code == 137, output
        assert rig.shell(container, "echo ok") == "ok\n"


def check_privileges(rig: Rig) -> None:
    """Exactly the listed capabilities, for root; none effective for others; no new privileges; a seccomp filter."""
    wanted = sum(1 << _CAPABILITY_NUMBERS[name] for name in CAPABILITIES)
    with rig.used_container() as container:
        root = _status(rig, container, 0)
        other = _status(rig, container, 1000)
    for status in (root, other):
        assert int(status["CapBnd"], 16) == wanted, status
        assert (int(status["CapInh"], 16), int(status["CapAmb"], 16)) == (0, 0), status
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), status
    assert (int(root["CapEff"], 16), int(root["CapPrm"], 16)) == (wanted, wanted), root
    assert (int(other["CapEff"], 16), int(other["CapPrm"], 16)) == (0, 0), other


def _status(rig: Rig, container: Container, user: int) -> dict[str, str]:
    text = rig.shell(container, "cat /proc/self/status", user=user, group=user)
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


_DENIED = {
    "mount": (165, '"none", "/tmp", "tmpfs", 0, 0'),
    "umount2": (166, '"/proc", 2'),
    "pivot_root": (155, '"/", "/"'),
    "fsopen": (430, '"tmpfs", 0'),
    "fsmount": (432, "-1, 0, 0"),
    "move_mount": (429, '-1, "", -1, "", 0'),
    "open_tree": (428, '-100, "/", 1'),
    "mount_setattr": (442, '-1, "", 0, 0, 0'),
    "setns": (308, "-1, 0"),
    "unshare user": (272, "0x10000000"),
    "unshare mount": (272, "0x20000"),
    "clone user": (56, "0x10000011, 0, 0, 0, 0"),
    "keyctl": (250, "0, -3, 0"),
    "add_key": (248, "0, 0, 0, 0, 0"),
    "request_key": (249, "0, 0, 0, 0"),
    "bpf": (321, "0, 0, 0"),
    "perf_event_open": (298, "0, 0, -1, -1, 0"),
    "kexec_load": (246, "0, 0, 0, 0"),
    "init_module": (175, '0, 0, ""'),
    "finit_module": (313, '-1, "", 0'),
    "delete_module": (176, '"none", 0'),
    "swapon": (167, '"/none", 0'),
    "swapoff": (168, '"/none"'),
    "settimeofday": (164, "0, 0"),
    "quotactl": (179, "0, 0, 0, 0"),
    "open_by_handle_at": (304, "-1, 0, 0"),
    "userfaultfd": (323, "0"),
    "fanotify_init": (300, "0, 0"),
    "acct": (163, "0"),
    "iopl": (172, "3"),
    "ioperm": (173, "0, 1, 1"),
    "reboot": (169, "0, 0, 0, 0"),
    "lookup_dcookie": (212, '0, "", 0'),
    "nfsservctl": (180, "0, 0, 0"),
}
_DENIED_BY_US = {"io_setup": (206, "1, 0")}
"""x86-64 numbers and arguments that would not fail with EPERM for another reason, or do harm, if the call were let
through."""


def check_a_process_knows_its_parent(rig: Rig) -> None:
    with rig.used_container() as container:
        first, second = rig.shell(container, "echo $$; sh -c 'echo $PPID'; true").split()
        assert rig.shell(container, "echo $PPID") == "0\n"  # a command's parent is outside of the sandbox
    assert first == second


def check_dangerous_calls_are_refused(rig: Rig) -> None:
    denied = _DENIED | (_DENIED_BY_US if rig.runtime.name == "runc" else {})
    lines = [f'r("{name}", {number}, {arguments});' for name, (number, arguments) in denied.items()]
    call = 'sub r { my ($n, $c, @a) = @_; $! = 0; my $x = syscall($c, @a); print "$n $x ", $!+0, "\\n"; }'
    script = call + "".join(lines)
    if os.uname().machine != "x86_64":
        return
    with rig.used_container() as container:
        answers = rig.shell(container, f"exec perl -e '{script}'").splitlines()
    assert len(answers) == len(denied), answers
    for answer in answers:
        assert answer.split()[-2:] in (["-1", "1"], ["-1", "38"]), answer  # EPERM or ENOSYS
    by_name = {answer.rsplit(" ", 2)[0] for answer in answers}
    assert by_name == set(denied)


def check_kernel_files_are_protected(rig: Rig) -> None:
    """Masked files are empty or unreadable, and kernel settings, devices and the stub's own directories cannot be
    written."""
    with rig.used_container() as container:
        assert rig.run(container, "sh", "-c", "cat /proc/kcore | head -c 1").stdout == b""
        for path in (
            "/proc/sys/kernel/hostname",
            "/proc/sysrq-trigger",
            "/sys/kernel/uevent_helper",
            f"{RUN_DIR}/x",
            f"{SHARE_DIR}/x",
        ):
            assert rig.run(container, "sh", "-c", f"echo x > {path}").code != 0, path
        assert rig.run(container, "sh", "-c", "mknod /tmp/disk b 8 0").code != 0
        devices = rig.shell(container, "echo x > /dev/null; head -c 4 /dev/zero | od -An -tx1; ls /dev").split()
        assert {"null", "zero", "full", "random", "urandom", "tty", "pts", "shm", "ptmx", "fd", "stdout"} <= set(
            devices
        ), devices
        assert not {"sda", "vda", "kmsg", "mem", "fuse"} & set(devices), devices


def check_shared_directories(rig: Rig) -> None:
    """The run directory and the share appear, the socket in it can be connected to by any user."""
    with rig.used_container() as container:
        run_dir = rig.work / "run" / container.id
        address = run_dir / "agent.sock"
        with socket.socket(socket.AF_UNIX) as server:
            # A path beyond 107 bytes does not fit into an address; the descriptor's path does.
            parent = os.open(run_dir, os.O_PATH)
            server.bind(f"/proc/self/fd/{parent}/agent.sock")
            os.close(parent)
            address.chmod(0o666)
            server.listen()
            target = f"pack_sockaddr_un('{RUN_DIR}/agent.sock')"
            connect = f"use Socket; socket(S, PF_UNIX, SOCK_STREAM, 0); connect(S, {target}) or die $!; print 'ok'"
            for user in (0, 1000):
                assert rig.run(container, "perl", "-e", connect, user=user, group=user).stdout == b"ok", user
        assert (
            rig.shell(container, f"test -x {SHARE_DIR}/init && test -d {SHARE_DIR}/lib && echo ok", user=1000) == "ok\n"
        )


def check_no_network(rig: Rig) -> None:
    with rig.used_container() as container:
        devices = rig.shell(container, "cat /proc/net/dev").splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
        assert rig.shell(container, "cat /proc/net/route").count("\n") <= 1
        script = """use Socket; socket(S, PF_INET, SOCK_STREAM, 0); bind(S, pack_sockaddr_in(0, INADDR_LOOPBACK)) or die "bind $!";
            listen(S, 1) or die; my $at = getsockname(S);
            socket(C, PF_INET, SOCK_STREAM, 0); connect(C, $at) or die "connect $!"; print "up";"""
        assert rig.run(container, "perl", "-e", script).stdout == b"up"


def check_bridge_network(rig: Rig) -> None:
    """The outside can be reached: here a server on one of the host's own addresses that is not loopback."""
    address = _host_address()
    if address is None:
        return  # a machine without any network has no outside
    with socket.create_server((address, 0)) as server, rig.container(network=Network.BRIDGE) as container:
        server.settimeout(DEADLINE_S)
        script = f"""use Socket; socket(S, PF_INET, SOCK_STREAM, 0);
            connect(S, pack_sockaddr_in({server.getsockname()[1]}, inet_aton("{address}"))) or die $!; my $x = <S>; print $x;"""
        with ThreadPoolExecutor(1) as pool:
            output = pool.submit(rig.run, container, "perl", "-e", script)
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello\n")
            assert output.result(DEADLINE_S).stdout == b"hello\n"


def _host_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks for the route (TEST-NET-1, RFC 5737)
        except OSError:
            return None
        return str(probe.getsockname()[0])


CHECKS: tuple[Callable[[Rig], None], ...] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_")
)
