"""The contract of `runtime/base.py` as checks that run real containers. Needs root and the driver's runtime.

A `Rig` makes containers for one driver and gives each a real root, the way the engine does (an overlay over a shared tree, pivoted in
from outside). A check is a function `check_*(rig)` that raises AssertionError; `CHECKS` lists them all. Every check uses containers of
its own, so they run in any order.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from snapshotd.errors import CommandNotFound, CommandNotRunnable, SandboxFailed, SnapshotdError, UsageError
from snapshotd.kernel import cgroup, files, mounts, namespaces
from snapshotd.kernel import syscalls as sc
from snapshotd.runtime.base import CAPABILITIES, DEFAULT_PATH, RUN_DIR, SHARE_DIR, Container, ContainerSpec, ExecSpec, Process, Runtime
from snapshotd.types import ContainerID, IdMap, Limits, Network, new_id

DEADLINE_S = 30.0
_LIMITS = Limits(memory_bytes=256 << 20, cpus=0.5, pids=64)
_CAPABILITY_NUMBERS = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_FSETID": 4, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7,
    "CAP_SETPCAP": 8, "CAP_NET_BIND_SERVICE": 10, "CAP_SYS_CHROOT": 18, "CAP_SETFCAP": 31,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Output:
    """What a command did."""

    code: int | None
    stdout: bytes
    stderr: bytes


class Rig:
    """Containers of one driver. `work` is an empty directory that everybody may search; `tree` a root file system with `sh`, the usual
    small tools and perl; `init` the static init program; `places` are directories of the runtime below which mounts are its own."""

    def __init__(self, runtime: Runtime, work: Path, tree: Path, init: Path, places: Sequence[Path] = ()) -> None:
        self.runtime = runtime
        self.places = tuple(os.fsencode(place) + b"/" for place in (work, *places))
        self.work = work
        self.tree = tree
        self.share = work / "share"
        (self.share / "lib").mkdir(parents=True)
        shutil.copy(init, self.share / "init")
        for directory in (work, self.share, self.share / "lib", self.share / "init"):
            directory.chmod(0o755)

    def spec(self, *, limits: Limits = _LIMITS, network: Network = Network.NONE) -> ContainerSpec:
        """A spec with a fresh id and run directory."""
        container_id = ContainerID(new_id())
        run_dir = self.work / "run" / container_id
        run_dir.mkdir(parents=True)
        for directory in (self.work / "run", run_dir):
            directory.chmod(0o711)
        return ContainerSpec(container_id, run_dir, self.share, limits, network, image_name="contract")

    @contextlib.contextmanager
    def container(self, *, limits: Limits = _LIMITS, network: Network = Network.NONE) -> Iterator[Container]:
        """A container with a real root; destroyed at the end."""
        spec = self.spec(limits=limits, network=network)
        container = self.runtime.create(spec)
        try:
            self.give_root(container)
            yield container
        finally:
            self.runtime.destroy(spec.id)

    def give_root(self, container: Container) -> None:
        """Pivot the container into a fresh overlay over the tree."""
        layer = self.work / "layers" / container.id
        for part in ("upper", "work"):
            (layer / part).mkdir(parents=True)
            (layer / part).chmod(0o755)
        give_root(container, self.tree, layer)

    def start(self, container: Container, *argv: str, **options: object) -> Process:
        """`exec` with root's PATH, in / unless told otherwise."""
        given = {"cwd": "/", "env": {"PATH": DEFAULT_PATH, "HOME": "/root"}, **options}
        return self.runtime.exec(container, ExecSpec(argv, **given))  # type: ignore[arg-type]

    def run(self, container: Container, *argv: str, **options: object) -> Output:
        """Run a command to its end, both streams read to theirs."""
        process = self.start(container, *argv, **options)
        try:
            stdout, stderr = read_all([process.stdout_fd, process.stderr_fd])
        finally:
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
        return Output(process.wait(DEADLINE_S), stdout, stderr)

    def shell(self, container: Container, script: str, **options: object) -> str:
        """Standard output of a shell script that must succeed."""
        output = self.run(container, "sh", "-c", script, **options)
        assert output.code == 0, output
        return output.stdout.decode()


def give_root(container: Container, tree: Path, layer: Path) -> None:
    """Pivot `container` into an overlay of `layer` (upper, work) over `tree`. What the engine does with layers, without its store."""
    with contextlib.ExitStack() as opened:

        def hold(fd: int) -> int:
            opened.callback(os.close, fd)
            return fd

        def directory(path: Path) -> int:
            fd = hold(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            if container.id_map is None:
                return fd
            userns = hold(namespaces.user_namespace(container.id_map))
            return hold(mounts.id_mapped_clone(fd, userns))

        parent = directory(layer)
        upper, work = (hold(os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)) for part in ("upper", "work"))
        new_root = hold(mounts.overlay([directory(tree)], upper, work))
        namespace = hold(os.open(f"/proc/{container.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        points = [m.point for m in mounts.read_mountinfo(container.pid) if m.point != b"/"]
        top = [p for p in dict.fromkeys(points) if not any(p.startswith(q + b"/") for q in points)]
        namespaces.in_mount_namespace(namespace, lambda: _switch(new_root, top))


def _switch(new_root: int, points: Sequence[bytes]) -> None:
    os.chdir("/")
    trees = [(point, mounts.clone(sc.AT_FDCWD, point, recursive=True)) for point in points]
    spot = os.open("/proc", os.O_PATH)
    mounts.attach(new_root, spot)
    os.close(spot)
    for point, tree in trees:
        spot = files.open_beneath(new_root, point[1:], os.O_PATH)
        mounts.attach(tree, spot)
        os.close(spot)
        os.close(tree)
    os.fchdir(new_root)
    sc.call("pivot_root", b".", b".")
    mounts.detach(b".")


def read_all(fds: Sequence[int]) -> list[bytes]:
    """Read several descriptors to their ends at once. AssertionError after the deadline."""
    parts: dict[int, list[bytes]] = {fd: [] for fd in fds}
    deadline = time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            assert ready, "no end of file within the deadline"
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                parts[key.fd].append(data)
                if not data:
                    selector.unregister(key.fd)
    return [b"".join(parts[fd]) for fd in fds]


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait until something holds; AssertionError after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.005)


# -- isolation ---------------------------------------------------------------------------------------------------------------


def check_namespaces(rig: Rig) -> None:
    with rig.container() as container:
        for kind in ("pid", "mnt", "uts", "ipc", "net", "cgroup"):
            assert _namespace(container.pid, kind) != _namespace("self", kind), kind
        assert (_namespace(container.pid, "user") != _namespace("self", "user")) == (container.id_map is not None)
        assert rig.shell(container, "cat /proc/sys/kernel/hostname") == "sandbox\n"
        assert _id_map(container) == container.id_map
        assert rig.shell(container, "echo $$; cat /proc/1/comm").split()[1] in ("init", "catatonit", "exe")


def _namespace(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


def _id_map(container: Container) -> IdMap | None:
    inside, outside, count = (int(word) for word in Path(f"/proc/{container.pid}/uid_map").read_text().split())
    return None if (inside, outside) == (0, 0) and count == 2**32 - 1 else IdMap(outside, count)


def check_limits_are_set(rig: Rig) -> None:
    with rig.container() as container:
        values = _cgroup_values(container.pid)
    assert values["memory"] == 256 << 20, values
    assert values["pids"] == 64, values
    assert values["cpu"] == 0.5, values
    assert values["swap"] in (0, None), values


def _cgroup_values(pid: int) -> dict[str, float | None]:
    """The limits that the kernel has for the cgroup of `pid`, both versions alike. `swap` is None where it is not counted."""
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
        return {"memory": memory, "swap": swap, "cpu": quota / period, "pids": int((paths["pids"] / "pids.max").read_text())}
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
    with rig.container() as container:
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
    with rig.container() as container:
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
    "mount": (165, '"none", "/tmp", "tmpfs", 0, 0'), "umount2": (166, '"/proc", 2'), "pivot_root": (155, '"/", "/"'),
    "fsopen": (430, '"tmpfs", 0'), "fsmount": (432, "-1, 0, 0"), "move_mount": (429, '-1, "", -1, "", 0'),
    "open_tree": (428, '-100, "/", 1'), "mount_setattr": (442, '-1, "", 0, 0, 0'), "setns": (308, "-1, 0"),
    "unshare user": (272, "0x10000000"), "unshare mount": (272, "0x20000"), "clone user": (56, "0x10000011, 0, 0, 0, 0"),
    "keyctl": (250, "0, -3, 0"), "add_key": (248, "0, 0, 0, 0, 0"), "request_key": (249, "0, 0, 0, 0"), "bpf": (321, "0, 0, 0"),
    "perf_event_open": (298, "0, 0, -1, -1, 0"), "kexec_load": (246, "0, 0, 0, 0"), "init_module": (175, '0, 0, ""'),
    "finit_module": (313, '-1, "", 0'), "delete_module": (176, '"none", 0'), "swapon": (167, '"/none", 0'), "swapoff": (168, '"/none"'),
    "settimeofday": (164, "0, 0"), "quotactl": (179, "0, 0, 0, 0"), "open_by_handle_at": (304, "-1, 0, 0"), "userfaultfd": (323, "0"),
    "fanotify_init": (300, "0, 0"), "acct": (163, "0"), "iopl": (172, "3"), "ioperm": (173, "0, 1, 1"), "reboot": (169, "0, 0, 0, 0"),
    "lookup_dcookie": (212, '0, "", 0'), "nfsservctl": (180, "0, 0, 0"),
}  # fmt: skip
"""x86-64 numbers and arguments that would not fail with EPERM for another reason, or do harm, if the call were let through."""


def check_dangerous_calls_are_refused(rig: Rig) -> None:
    lines = [f'r("{name}", {number}, {arguments});' for name, (number, arguments) in _DENIED.items()]
    call = 'sub r { my ($n, $c, @a) = @_; $! = 0; my $x = syscall($c, @a); print "$n $x ", $!+0, "\\n"; }'
    script = call + "".join(lines)
    if os.uname().machine != "x86_64":
        return
    with rig.container() as container:
        answers = rig.shell(container, f"exec perl -e '{script}'").splitlines()
    assert len(answers) == len(_DENIED), answers
    for answer in answers:
        assert answer.split()[-2:] in (["-1", "1"], ["-1", "38"]), answer  # EPERM or ENOSYS
    by_name = {answer.rsplit(" ", 2)[0] for answer in answers}
    assert by_name == set(_DENIED)


def check_kernel_files_are_protected(rig: Rig) -> None:
    """Masked files are empty or unreadable, and kernel settings, devices and the stub's own directories cannot be written."""
    with rig.container() as container:
        assert rig.run(container, "sh", "-c", "cat /proc/kcore | head -c 1").stdout == b""
        for path in ("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper", f"{RUN_DIR}/x", f"{SHARE_DIR}/x"):
            assert rig.run(container, "sh", "-c", f"echo x > {path}").code != 0, path
        assert rig.run(container, "sh", "-c", "mknod /tmp/disk b 8 0").code != 0
        devices = rig.shell(container, "echo x > /dev/null; head -c 4 /dev/zero | od -An -tx1; ls /dev").split()
        assert {"null", "zero", "full", "random", "urandom", "tty", "pts", "shm", "ptmx", "fd", "stdout"} <= set(devices), devices
        assert not {"sda", "vda", "kmsg", "mem", "fuse"} & set(devices), devices


def check_shared_directories(rig: Rig) -> None:
    """The run directory and the share appear, the socket in it can be connected to by any user."""
    with rig.container() as container:
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
        assert rig.shell(container, f"test -x {SHARE_DIR}/init && test -d {SHARE_DIR}/lib && echo ok", user=1000) == "ok\n"


def check_no_network(rig: Rig) -> None:
    with rig.container() as container:
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


# -- commands ----------------------------------------------------------------------------------------------------------------


def check_exit_codes(rig: Rig) -> None:
    with rig.container() as container:
        for code in (0, 1, 77, 126, 127, 255):
            assert rig.run(container, "sh", "-c", f"exit {code}").code == code
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV):
            assert rig.run(container, "sh", "-c", f"kill -{int(number)} $$").code == 128 + number


def check_streams(rig: Rig) -> None:
    """Separate, and byte for byte; standard input is empty."""
    with rig.container() as container:
        script = "binmode STDOUT; print STDOUT map { chr } 0..255; binmode STDERR; print STDERR map { chr } reverse 0..255;"
        output = rig.run(container, "perl", "-e", script)
        assert output == Output(0, bytes(range(256)), bytes(reversed(range(256))))
        assert rig.run(container, "cat") == Output(0, b"", b"")


def check_big_output(rig: Rig) -> None:
    size = 10 << 20
    with rig.container() as container:
        script = f"my $b = 'o' x {size}; my $e = 'e' x {size}; print STDOUT $b; print STDERR $e; exit 3"
        output = rig.run(container, "perl", "-e", script)
    assert (output.code, len(output.stdout), len(output.stderr)) == (3, size, size)
    assert (set(output.stdout), set(output.stderr)) == ({ord("o")}, {ord("e")})


def check_environment_is_complete(rig: Rig) -> None:
    env = {"PATH": DEFAULT_PATH, "HOME": "/x y", "EMPTY": "", "ODD": "a=b\n'\"$x ä", "LANG": "C.UTF-8"}
    with rig.container() as container:
        output = rig.run(container, "env", "-0", env=env)
    assert dict(item.split("=", 1) for item in output.stdout.decode().split("\0") if item) == env


def check_arguments_arrive(rig: Rig) -> None:
    arguments = ["", " ", "a b", "'\"\\$x", "ä\n", "-x", "x" * 100_000]
    with rig.container() as container:
        output = rig.run(container, "perl", "-e", 'print map { "$_\\0" } @ARGV', "--", *arguments)
    assert output.stdout.decode().split("\0")[:-1] == arguments


def check_directory_and_user(rig: Rig) -> None:
    with rig.container() as container:
        rig.shell(container, "mkdir -p /workspace/sub && chmod 755 /workspace")
        for user, group in ((0, 0), (1000, 1001)):
            text = rig.shell(container, "pwd; id -u; id -g", cwd="/workspace/sub", user=user, group=group)
            assert text == f"/workspace/sub\n{user}\n{group}\n"
        assert rig.run(container, "sh", "-c", "echo x > /workspace/theirs", user=1000, group=1000).code != 0
        assert rig.run(container, "sh", "-c", "echo x > /workspace/ours").code == 0


def check_output_devices_open(rig: Rig) -> None:
    """/dev/stdout and /dev/stderr can be opened again by the command's user, as scripts do."""
    with rig.container() as container:
        for user in (0, 1000):
            output = rig.run(container, "sh", "-c", "echo out > /dev/stdout; echo err > /dev/stderr", user=user, group=user)
            assert output == Output(0, b"out\n", b"err\n"), (user, output)


def check_commands_that_cannot_start(rig: Rig) -> None:
    with rig.container() as container:
        script = """mkdir -p /t/locked /t/dir; echo x > /t/file; printf '#!/no/such/interpreter\\n' > /t/script; chmod 755 /t/script;
            printf '\\177ELF broken' > /t/broken; chmod 755 /t/broken; chmod 700 /t/locked; chmod 755 /t;
            cp /bin/true /t/locked/x; : > /t/empty; chmod 755 /t/empty"""
        rig.shell(container, script)
        cases: list[tuple[Sequence[str], dict[str, object], type[SnapshotdError]]] = [
            (["no-such-program"], {}, CommandNotFound),
            (["/no/such/program"], {}, CommandNotFound),
            (["./relative"], {}, CommandNotFound),
            (["/t/file/x"], {}, CommandNotFound),
            (["sh", "-c", "true"], {"env": {"PATH": "/nowhere"}}, CommandNotFound),
            (["sh", "-c", "true"], {"cwd": "/no/such/directory"}, CommandNotFound),
            (["sh", "-c", "true"], {"cwd": "/t/file"}, CommandNotFound),
            (["/t/file"], {}, CommandNotRunnable),
            (["/t/dir"], {}, CommandNotRunnable),
            (["/t/script"], {}, CommandNotRunnable),
            (["/t/broken"], {}, CommandNotRunnable),
            (["/t/empty"], {}, CommandNotRunnable),
            (["true", "x" * 140_000], {}, CommandNotRunnable),
            (["/t/locked/x"], {"user": 1000, "group": 1000}, CommandNotRunnable),
            ([], {}, UsageError),
            (["sh"], {"cwd": "relative"}, UsageError),
            (["a\0b"], {}, UsageError),
            (["sh", "\udcff"], {}, UsageError),
            (["sh"], {"env": {"": "x"}}, UsageError),
            (["sh"], {"user": -1}, UsageError),
        ]
        for argv, options, error in cases:
            _expect(error, lambda argv=argv, options=options: rig.start(container, *argv, **options), (argv, options))  # type: ignore[misc]
        assert rig.shell(container, "echo ok") == "ok\n"


def _expect(error: type[SnapshotdError], action: Callable[[], object], what: object) -> SnapshotdError:
    try:
        outcome: object = action()
    except SnapshotdError as exc:
        outcome = exc
    assert isinstance(outcome, error), f"{what}: {outcome!r} instead of {error.__name__}"
    assert len(outcome.message) < 1000, f"{what}: {outcome}"
    assert "\n" not in outcome.message, f"{what}: {outcome}"
    return outcome


def check_background_child(rig: Rig) -> None:
    """A child that keeps the output open neither delays the exit code nor dies; what it writes later still arrives."""
    with rig.container() as container:
        script = "(while ! test -e /go; do sleep 0.02; done; echo late; echo late >&2; touch /done; exec sleep 1000) & echo early; exit 5"
        process = rig.start(container, "sh", "-c", script)
        try:
            begin = time.monotonic()
            assert process.wait(DEADLINE_S) == 5
            assert time.monotonic() - begin < 5
            assert process.wait(0) == 5
            rig.shell(container, "touch /go; while ! test -e /done; do sleep 0.02; done")
            assert _read_lines(process.stdout_fd, 2) == b"early\nlate\n"
            assert _read_lines(process.stderr_fd, 1) == b"late\n"
        finally:
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
        assert "sleep" in rig.shell(container, "cat /proc/[0-9]*/comm")


def check_background_child_outlives_reader(rig: Rig) -> None:
    """Output that is written after the caller closed its end kills nobody who handles the error."""
    with rig.container() as container:
        script = "(trap '' PIPE; while ! test -e /go; do sleep 0.02; done; echo late; touch /done; exec sleep 1000) & exit 0"
        process = rig.start(container, "sh", "-c", script)
        assert process.wait(DEADLINE_S) == 0
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)
        rig.shell(container, "touch /go; while ! test -e /done; do sleep 0.02; done")


def _read_lines(fd: int, lines: int) -> bytes:
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while data.count(b"\n") < lines:
            assert selector.select(DEADLINE_S), f"only {data!r} came"
            part = os.read(fd, 4096)
            assert part, f"ended after {data!r}"
            data += part
    return data


def check_wait_and_kill(rig: Rig) -> None:
    with rig.container() as container:
        process = rig.start(container, "sleep", "1000")
        try:
            assert process.wait(0) is None
            assert process.wait(0.05) is None
            assert Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n"
            waiters = [ThreadPoolExecutor(1).submit(process.wait, DEADLINE_S) for _ in range(3)]
            process.kill()
            assert [waiter.result(DEADLINE_S) for waiter in waiters] == [137] * 3
            assert process.wait() == 137
            process.kill()
            assert read_all([process.stdout_fd, process.stderr_fd]) == [b"", b""]
        finally:
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)


def check_parallel_commands(rig: Rig) -> None:
    with rig.container() as container, ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda i: rig.run(container, "sh", "-c", f"echo {i}; echo e{i} >&2; exit {i}"), range(24)))
    assert outputs == [Output(i, b"%d\n" % i, b"e%d\n" % i) for i in range(24)]


def check_orphans_are_reaped(rig: Rig) -> None:
    with rig.container() as container:
        rig.shell(container, "for i in 1 2 3 4 5; do (sleep 0.01 &) ; done")
        eventually(lambda: len(_members(container)) == 1, "orphans that ended are still there")


def check_command_enters_frozen_container(rig: Rig) -> None:
    """A command that is started while the container is frozen runs once it is thawed."""
    with rig.container() as container:
        frozen = cgroup.of_process(container.pid)
        rig.shell(container, "true")
        frozen.freeze()
        with ThreadPoolExecutor(1) as pool:
            output = pool.submit(rig.run, container, "echo", "ok")
            time.sleep(0.1)  # gives a wrong driver time to fail
            assert not output.done()
            frozen.thaw()
            assert output.result(DEADLINE_S) == Output(0, b"ok\n", b"")


def check_no_descriptor_leaks(rig: Rig) -> None:
    with rig.container() as container:

        def work() -> None:
            rig.run(container, "true")
            _expect(CommandNotFound, lambda: rig.start(container, "no-such-program"), "missing program")

        work()
        _settle()
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(10):
            work()
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "descriptors were leaked")
    assert not list((rig.work / "run" / container.id).glob("exec-*"))


def _settle() -> None:
    """Wait until threads that serve ended commands are gone."""
    eventually(lambda: not any(thread.name.startswith("exec-") for thread in threading.enumerate()), "threads of commands stay")


# -- lifecycle ---------------------------------------------------------------------------------------------------------------


def check_create(rig: Rig) -> None:
    spec = rig.spec()
    container = rig.runtime.create(spec)
    try:
        assert container.id == spec.id
        assert _members(container) == [container.pid]
        assert spec.id in rig.runtime.list()
    finally:
        rig.runtime.destroy(spec.id)
    assert spec.id not in rig.runtime.list()


def check_destroy_leaves_nothing(rig: Rig) -> None:
    """Processes that detached, ignore signals or were never waited for, their cgroup, mounts and network helper: all gone."""
    before = _host_mounts(rig)
    with rig.container(network=Network.BRIDGE) as container:
        stubborn = "trap '' TERM INT HUP; while :; do sleep 1000; done"
        for script in (f"setsid sh -c \"{stubborn}\" & exit 0", stubborn, "exit 0"):
            process = rig.start(container, "sh", "-c", script)
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)
        pids, net = _members(container), _namespace(container.pid, "net")
        directories = _cgroup_directories(container)
        assert len(pids) >= 3
        assert directories
        rig.runtime.destroy(container.id)
        _assert_gone(container, pids, net, directories)
    assert _host_mounts(rig) == before


def _assert_gone(container: Container, pids: Sequence[int], net: str, directories: Sequence[Path]) -> None:
    for pid in (container.pid, *pids):
        assert not os.path.exists(f"/proc/{pid}"), Path(f"/proc/{pid}/status").read_text()
    assert [directory for directory in directories if directory.exists()] == []
    holders = [pid for pid in os.listdir("/proc") if pid.isdigit() and _net_of(pid) == net]
    assert holders == [], [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in holders]
    text = b"\0".join(_command_line(pid) for pid in os.listdir("/proc") if pid.isdigit())
    assert container.id.encode() not in text
    assert f"/proc/{container.pid}/ns/net".encode() not in text


def _net_of(pid: str) -> str | None:
    try:
        return _namespace(pid, "net")
    except OSError:
        return None


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _host_mounts(rig: Rig) -> list[bytes]:
    """The mounts on the host that can only be the driver's."""
    return sorted(m.point for m in mounts.read_mountinfo() if m.point.startswith(rig.places))


def _members(container: Container) -> list[int]:
    """Every process in the container's pid namespace, as the host numbers them; zombies included."""
    namespace, found = _namespace(container.pid, "pid"), []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                if _namespace(pid, "pid") == namespace:
                    found.append(int(pid))
            except OSError:
                continue  # ended
    return sorted(found)


def _cgroup_directories(container: Container) -> list[Path]:
    paths = {line.split(":", 2)[2] for line in Path(f"/proc/{container.pid}/cgroup").read_text().splitlines()}
    points = [Path(os.fsdecode(m.point)) for m in mounts.read_mountinfo() if m.fs_type in ("cgroup", "cgroup2")]
    found = {point / path.lstrip("/") for point in points for path in paths if container.id in path or len(path) > 60}
    return sorted(directory for directory in found if directory.is_dir())


def check_destroy_is_idempotent(rig: Rig) -> None:
    with rig.container() as container:
        for _ in range(3):
            rig.runtime.destroy(container.id)
    rig.runtime.destroy(ContainerID(new_id()))


def check_destroy_by_several_threads(rig: Rig) -> None:
    """All removals of one container at the same time succeed, also while commands are being started in it."""
    with rig.container() as container, ThreadPoolExecutor(8) as pool:

        def start() -> None:
            try:
                process = rig.start(container, "sleep", "1000")
            except SandboxFailed:
                return
            os.close(process.stdout_fd)
            os.close(process.stderr_fd)

        rig.shell(container, "true")
        work = [pool.submit(start) for _ in range(4)] + [pool.submit(rig.runtime.destroy, container.id) for _ in range(4)]
        for future in work:
            future.result(DEADLINE_S)
        rig.runtime.destroy(container.id)
        assert container.id not in rig.runtime.list()
        eventually(lambda: _is_gone(container.pid), "its init is still there")


def _is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def check_destroy_frozen(rig: Rig) -> None:
    """A container that a crash left frozen can be removed at once."""
    with rig.container() as container:
        process = rig.start(container, "sleep", "1000")
        cgroup.of_process(container.pid).freeze()
        begin = time.monotonic()
        rig.runtime.destroy(container.id)
        assert time.monotonic() - begin < 8
        assert process.wait(DEADLINE_S) == 137
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def check_destroy_ends_commands(rig: Rig) -> None:
    """Whoever waits for a command of a destroyed container gets 137 and the end of its output."""
    with rig.container() as container:
        process = rig.start(container, "sh", "-c", "echo before; exec sleep 1000")
        with ThreadPoolExecutor(1) as pool:
            assert _read_lines(process.stdout_fd, 1) == b"before\n"
            waiter = pool.submit(process.wait, DEADLINE_S)
            rig.runtime.destroy(container.id)
            assert waiter.result(DEADLINE_S) == 137
        assert read_all([process.stdout_fd, process.stderr_fd]) == [b"", b""]
        os.close(process.stdout_fd)
        os.close(process.stderr_fd)


def check_dead_container(rig: Rig) -> None:
    """When its init is gone, a command is refused as SandboxFailed, the container is still listed, and it can be destroyed."""
    with rig.container() as container:
        os.kill(container.pid, signal.SIGKILL)
        eventually(lambda: not os.path.exists(f"/proc/{container.pid}/ns/mnt") or _is_zombie(container.pid), "init does not die")
        _expect(SandboxFailed, lambda: rig.start(container, "true"), "command in a dead container")
        assert container.id in rig.runtime.list()
        rig.runtime.destroy(container.id)
        assert container.id not in rig.runtime.list()
        _expect(SandboxFailed, lambda: rig.start(container, "true"), "command in a destroyed container")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check_failed_create_leaves_nothing(rig: Rig) -> None:
    before = _host_mounts(rig), rig.runtime.list(), sorted(os.listdir("/proc/self/fd"))
    broken = rig.work / "broken-share"
    (broken / "lib").mkdir(parents=True)
    for content, mode in ((b"", 0o755), (b"not a program", 0o755), (b"\x7fELF", 0o755), (b"", 0o644)):
        (broken / "init").write_bytes(content)
        (broken / "init").chmod(mode)
        spec = rig.spec()
        spec = ContainerSpec(spec.id, spec.run_dir, broken, spec.limits, spec.network)
        _expect(SandboxFailed, lambda spec=spec: rig.runtime.create(spec), (content, mode))  # type: ignore[misc]
        after = _host_mounts(rig), rig.runtime.list(), sorted(os.listdir("/proc/self/fd"))
        assert after == before
        assert [p for p in os.listdir("/proc") if p.isdigit() and spec.id.encode() in _command_line(p)] == []
    shutil.rmtree(broken)


def check_concurrent_lifecycles(rig: Rig) -> None:
    """Containers made and destroyed at the same time do not disturb each other."""

    def one(number: int) -> str:
        with rig.container() as container:
            return rig.shell(container, f"echo {number} > /mine; cat /mine")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [f"{number}\n" for number in range(8)]


def check_logging_never_hurts(rig: Rig) -> None:
    with rig.container() as container:
        for data in (b"", b"line\n", b"x" * (1 << 20), bytes(range(256))):
            rig.runtime.log(container, data)
    rig.runtime.log(container, b"gone\n")


CHECKS: tuple[Callable[[Rig], None], ...] = tuple(
    value for name, value in sorted(globals().items()) if name.startswith("check_") and callable(value)
)
