"""The processes that change files in a folder: the kernel names each (fanotify), and it comes from an agent, or from
somebody else.

The agent is known from its hook, which is a child of it. A change is a session's if the process that made it comes from
that session's agent. A process that has gone before it was looked up is not known, and so is a change that the kernel
does not tell: through a mapping, through another name of the file outside of the folder, or in a directory so new that
it has no mark yet. A thread looks processes up at once, so little is unknown.

Where the kernel does not tell at all (the file system of a network, an overlay, lost events, too many directories),
`take` says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from snapshotd.engine.folders import ignore
from snapshotd.kernel import fanotify, files, turns
from snapshotd.kernel.processes import ancestry

MOST_DIRECTORIES = 20_000
MOST_AGENTS = 50
"""Agents of one folder that are known at once. Each has a descriptor."""
_MOST_TOUCHED = 300_000
_MOST_AT_ONCE = 100_000
_MOST_PROCESSES = 10_000
_PROGRAM = b"send.py"
_SHELL = re.compile(rb"-?(ba|da|z|k|fi|a)?sh|busybox")
_PASSED = {ignore.NEVER, *(rule.strip("/") for rule in ignore.ALWAYS)}
FOREIGN, UNKNOWN = "\0foreign", "\0unknown"
"""No session has such an id."""

Process = tuple[int, int]
"""Number and start time: they name one process for good."""


def agent_of(hook: int) -> Process | None:
    """The agent whose hook this process is: the nearest process above that is no shell around our program. None: it
    cannot be seen."""
    try:
        for process in ancestry(hook)[1:]:
            with open(f"/proc/{process[0]}/cmdline", "rb") as file:
                if not _runs_hook(file.read(1 << 16).split(b"\0")) and process[0] > 1:
                    return process
    except OSError:
        pass
    return None


def _runs_hook(words: list[bytes]) -> bool:
    """True for our program, and for a shell whose script names it. An agent may have that name in its task."""
    name = words[0].rpartition(b"/")[2]
    if _SHELL.fullmatch(name):
        return any(_PROGRAM in word for word in words)
    script = next((word for word in words[1:] if not word.startswith(b"-")), b"")
    return name.startswith(b"python") and script.endswith(_PROGRAM)


@dataclass(slots=True)
class Touches:
    """The paths that were touched in a time, and by which sessions. `knows` False: the kernel did not tell all of it."""

    knows: bool = False
    touched: dict[bytes, set[str]] = field(default_factory=dict)
    renamed: dict[bytes, set[str]] = field(default_factory=dict)
    """Directories and files whose names came or went: that touches everything below."""

    def __or__(self, other: Touches) -> Touches:
        found = Touches(self.knows and other.knows)
        for one in (self, other):
            for mine, theirs in ((found.touched, one.touched), (found.renamed, one.renamed)):
                for path, who in theirs.items():
                    mine.setdefault(path, set()).update(who)
        return found

    def who_touched(self, path: bytes) -> set[str]:
        """The sessions that touched a path, or `FOREIGN` and `UNKNOWN` processes. Empty: the kernel told of nobody."""
        who = set(self.touched.get(path, ()))
        while path:
            who |= self.renamed.get(path, set())
            path = path.rpartition(b"/")[0]
        return who


class Writers:
    """Watches one folder, until `close`. OSError, NotImplementedError: the kernel does not tell of it. Thread-safe.
    `gone` is called with this, in the watching thread, when an agent has ended. The folder's descriptor keeps its file
    system from being unmounted: the callee closes what has no agent any more (`close_unused`)."""

    def __init__(self, root: int, gone: Callable[[Writers], object]) -> None:
        if not fanotify.is_local(root):
            raise OSError("its file system does not tell who changed a file")
        self._gone = gone
        self._lock = threading.Lock()
        self._marks = fanotify.NameMarks()
        self._root = os.dup(root)
        self._marked = 0
        self._followed: set[str] = set()
        self._agents: dict[Process, str] = {}
        self._pidfds: dict[int, Process] = {}
        self._verdicts: dict[int, str] = {}
        self._paths: dict[bytes, bytes | None] = {}
        self._now = Touches()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listening = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="folder-writers")
        self._thread.start()

    def close(self) -> None:
        """Return when the thread has ended. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._marks.close()
        for fd in (self._root, self._wake, *self._pidfds):
            os.close(fd)

    def close_unused(self) -> None:
        """Close unless an agent that is known still runs."""
        with self._lock:
            if self._agents:
                return
        self.close()

    @contextlib.contextmanager
    def open_root(self) -> Iterator[int]:
        """A descriptor of the folder. OSError: it is closed."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "nobody watches it any more")
            root = os.dup(self._root)
        try:
            yield root
        finally:
            os.close(root)

    def follow(self, directories: Iterable[str]) -> None:
        """Have these directories watched too."""
        with self._lock:
            if not self._closed:
                new = set(directories) - self._followed
                self._followed |= new
                for path in new:
                    with contextlib.suppress(OSError):
                        fd = files.open_deep(self._root, os.fsencode(path), one_device=True)
                        try:
                            self._mark(fd)
                        finally:
                            os.close(fd)

    def know(self, session: str, agent: Process) -> None:
        """Note the agent of a session."""
        with self._lock:
            if self._closed or self._agents.get(agent) == session:
                return
            if agent not in self._agents:
                try:
                    pidfd = os.pidfd_open(agent[0])
                except OSError:
                    return
                self._pidfds[pidfd] = agent
                if len(self._pidfds) > MOST_AGENTS:
                    self._forget(next(iter(self._pidfds)))
                os.eventfd_write(self._wake, 1)
            self._agents[agent] = session
            self._verdicts.clear()

    def _forget(self, pidfd: int) -> None:
        os.close(pidfd)
        self._agents.pop(self._pidfds.pop(pidfd), None)

    def listen(self, on: bool) -> None:
        """Look processes up as they change files, or leave the events to the next `take`: between calls it does not
        matter whose they are."""
        with self._lock:
            if not self._closed and on != self._listening:
                self._listening = on
                os.eventfd_write(self._wake, 1)

    def take(self) -> Touches:
        """Return the touches since the last call, and forget them."""
        with self._lock:
            if self._closed:
                return Touches()
            self._read()
            taken, self._now = self._now, Touches(knows=self._marked < MOST_DIRECTORIES)
            self._verdicts.clear()  # a number is soon that of another process
            return taken

    def give_back(self, touches: Touches) -> None:
        """Have the next `take` tell these again: what they touched is in no snapshot yet."""
        with self._lock:
            self._now = touches | self._now

    def peek(self) -> Touches:
        """Return the touches since the last `take`, and keep them for the next one."""
        with self._lock:
            if self._closed:
                return Touches()
            self._read()
            return self._now | Touches(knows=True)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            poll = select.poll()
            with self._lock:
                watched = [self._wake, *self._pidfds, *([self._marks.fileno()] if self._listening else [])]
            for fd in watched:
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            turns.give_way()
            with self._lock:
                if self._closed:
                    return
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._marks.fileno() in ready:
                    self._read()
                ended = [fd for fd in ready if fd in self._pidfds]
                for fd in ended:
                    self._forget(fd)
            if ended:
                self._gone(self)

    def _read(self) -> None:
        if self._closed:
            return
        for number, touch in enumerate(self._marks.read()):
            if touch.lost or len(self._now.touched) > _MOST_TOUCHED:
                self._now.knows = False
                continue
            if number > _MOST_AT_ONCE:  # somebody writes faster than they are read
                self._now.knows = False
                return
            if touch.is_dir and touch.is_name:
                self._paths.clear()
            directory = self._directory(touch.handle)
            if directory is None:
                continue
            path = b"/".join(part for part in (directory, touch.name) if part)
            who = self._verdict(touch.pid)
            self._now.touched.setdefault(path, set()).add(who)
            if touch.is_name:
                self._now.renamed.setdefault(path, set()).add(who)
                if touch.is_dir:
                    self._mark_new(path)

    def _verdict(self, pid: int) -> str:
        found = self._verdicts.get(pid)
        if found is None:
            try:
                line = ancestry(pid)
                found = next((self._agents[one] for one in line if one in self._agents), FOREIGN)
            except (FileNotFoundError, ProcessLookupError):
                return UNKNOWN
            if len(self._verdicts) > _MOST_PROCESSES:
                self._verdicts.clear()
            self._verdicts[pid] = found
        return found

    def _directory(self, handle: bytes) -> bytes | None:
        """The path of a directory in the folder by now. None: it is no part of it (any more)."""
        if handle in self._paths:
            return self._paths[handle]
        found = None
        with contextlib.suppress(OSError):
            fd = fanotify.open_directory(self._root, handle)
            try:
                place, top = (os.fsencode(os.readlink(files.fd_path(one))) for one in (fd, self._root))
                if (place + b"/").startswith(top + b"/"):
                    found = place[len(top) + 1 :]
            finally:
                os.close(fd)
        if len(self._paths) > MOST_DIRECTORIES:
            self._paths.clear()
        self._paths[handle] = found
        return found

    def _mark_new(self, path: bytes) -> None:
        """Watch a directory that came, and those that are in it already."""
        todo = [path]
        while todo:
            one = todo.pop()
            if os.fsdecode(one.rpartition(b"/")[2]) in _PASSED:
                continue
            try:
                fd = files.open_deep(self._root, one, one_device=True)
            except OSError:
                continue
            try:
                if not self._mark(fd):
                    return
                with os.scandir(fd) as entries:
                    names = [os.fsencode(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
                todo += [one + b"/" + name for name in names]
            except OSError:
                continue
            finally:
                os.close(fd)

    def _mark(self, fd: int) -> bool:
        """False: there are too many, and from now on nothing is known. One that is made anew counts again."""
        if self._marked < MOST_DIRECTORIES:
            self._marks.add(fd)
            self._marked += 1
        return self._marked < MOST_DIRECTORIES
