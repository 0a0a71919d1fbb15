"""The system calls that a sandbox may make: an allow-list as data, in the form that an OCI runtime takes.

Everything that building, testing and debugging software uses is allowed; any other call fails with EPERM. Left out on
purpose: mounting in every form, namespaces (clone and unshare with namespace flags, setns), keyrings, bpf,
perf_event_open, kexec, modules, reboot, swap, setting clocks, quotas, opening files by handle, userfaultfd, io_uring,
fanotify_init, raw port access, and sockets of the families AF_ALG and AF_VSOCK. clone3 answers ENOSYS: its flags lie in
memory, where a filter cannot look, and every C library falls back to clone; so does io_setup, for asynchronous I/O has
65,536 requests for the whole machine (fs.aio-max-nr), which one sandbox could take from every database on it. 32-bit
programs are killed: their call table is the less tested one, and without it the filter, which is built anew for every
command, takes 4 ms less. The `docker` driver relies on the engine's default profile, which is alike but knows 32-bit
programs and asynchronous I/O.
"""

from __future__ import annotations

import errno
import platform
from functools import cache
from typing import Any

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir
fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync
ftruncate futimesat getcwd getdents getdents64 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch
ioctl lchown lgetxattr link linkat listmount listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat
name_to_handle_at newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink
readlinkat readv removexattr removexattrat rename renameat renameat2 rmdir sendfile setxattr setxattrat splice stat statfs statmount statx
symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes vmsplice write writev
fanotify_mark chroot landlock_create_ruleset landlock_add_rule landlock_restrict_self
"""
_MEMORY = """
brk cachestat get_mempolicy madvise map_shadow_stack mbind membarrier memfd_create memfd_secret migrate_pages mincore mlock mlock2
mlockall mmap move_pages mprotect mremap mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_madvise
process_mrelease process_vm_readv process_vm_writev remap_file_pages set_mempolicy set_mempolicy_home_node
"""
_PROCESSES = """
getrandom arch_prctl capget capset execve execveat exit exit_group fork get_robust_list get_thread_area getcpu getegid geteuid getgid
getgroups getpgid getpgrp getpid getppid getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set
kcmp kill modify_ldt pidfd_getfd pidfd_open pidfd_send_signal prctl prlimit64 ptrace restart_syscall rseq sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity
sched_setattr sched_setparam sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid
setfsuid setgid setgroups setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sysinfo tgkill times
tkill uname vfork wait4 waitid
"""
_SIGNALS_AND_TIME = """
alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep pause rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo setitimer sigaltstack signalfd signalfd4 time
timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
_WAITING_AND_IPC = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 futex futex_requeue futex_wait
futex_waitv futex_wake mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2
poll ppoll pselect6 select semctl semget semop semtimedop shmat shmctl shmdt shmget
"""
_NETWORK = """
accept accept4 bind connect getpeername getsockname getsockopt listen recv recvfrom recvmmsg recvmsg send sendmmsg sendmsg sendto
setsockopt shutdown socketpair
"""

_ABSENT = ("clone3", "io_setup")
"""These calls fail as if the kernel did not have them: programs do without."""
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_CLONE_NEWTIME = 0x80
"""Only for unshare; in clone these bits are the exit signal."""
_AF_ALG, _AF_RESERVED, _AF_VSOCK = 38, 39, 40
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
"""PER_LINUX, PER_LINUX32, both with UNAME26, ADDR_NO_RANDOMIZE (debuggers, sanitizers), and "tell me"."""
_ARCHITECTURES = {"x86_64": ["SCMP_ARCH_X86_64"], "aarch64": ["SCMP_ARCH_AARCH64"]}


def allowed_calls() -> list[str]:
    """Names of the calls that are allowed with any arguments."""
    return sorted(" ".join((_FILES, _MEMORY, _PROCESSES, _SIGNALS_AND_TIME, _WAITING_AND_IPC, _NETWORK)).split())


def _allow(name: str, *args: dict[str, Any]) -> dict[str, Any]:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(args)}


def _argument(operator: str, value: int, second: int = 0) -> dict[str, Any]:
    return {"index": 0, "op": f"SCMP_CMP_{operator}", "value": value, "valueTwo": second}


@cache
def profile() -> dict[str, Any]:
    """The value of `linux.seccomp` in an OCI configuration, for this machine's architecture. Shared: do not change it.

    Names that a runtime's libseccomp does not know are skipped by it. `socketcall` (32-bit) is left out because it
    hides the socket family in memory; C libraries have used the direct calls since 2015.
    """
    rules: list[dict[str, Any]] = [{"names": allowed_calls(), "action": "SCMP_ACT_ALLOW"}]
    rules.append(_allow("clone", _argument("MASKED_EQ", _NAMESPACE_FLAGS, 0)))
    rules.append(_allow("unshare", _argument("MASKED_EQ", _NAMESPACE_FLAGS | _CLONE_NEWTIME, 0)))
    rules += [_allow("socket", _argument("LT", _AF_ALG)), _allow("socket", _argument("EQ", _AF_RESERVED))]
    rules.append(_allow("socket", _argument("GT", _AF_VSOCK)))
    rules += [_allow("personality", _argument("EQ", value)) for value in _PERSONALITIES]
    rules.append({"names": list(_ABSENT), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": _ARCHITECTURES.get(platform.machine(), []),
        "syscalls": rules,
    }
