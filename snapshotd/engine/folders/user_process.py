"""The process that opens what a user names by a path. Standard library only; nothing of the daemon is open in it.

    python3 -I -S user_process.py DESCRIPTOR

The descriptor is a socket of packets. Each is a JSON object {"uid", "gid", "groups"} with one end of a stream beside it.
A child takes that user's rights for good, reads the request from the stream, does it and ends: so a path such as
`/proc/self/fd/3` leads to nothing but that stream, whatever a link on the way becomes meanwhile, and what never answers
holds this one child, which is killed.

    request    one line {"verb": "read", "path", "offset", "most"}, or {"verb": "create", "path", "bytes"} and the content
    answer     one line {"errno": null or a number}, then what was read
"""

import array
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time

LONGEST_S = 10
"""The longest that a child lives."""
_MEMORY_BYTES = 512 << 20
_PIECE_BYTES = 1 << 20


def main(descriptor: int) -> None:
    control = socket.socket(fileno=descriptor)
    children: dict[int, float] = {}
    while True:
        ready = select.select([control], [], [], 0.5 if children else None)[0]
        _reap(children)
        if not ready:
            continue
        packet, beside, _, _ = control.recvmsg(1 << 16, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
        if not packet:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return
        fds = array.array("i")
        for _, _, content in beside:
            fds.frombytes(content)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                control.close()
                _serve(json.loads(packet), socket.socket(fileno=fds[0]))
                code = 0
            finally:
                os._exit(code)
        os.close(fds[0])
        children[pid] = time.monotonic() + LONGEST_S


def _reap(children: dict[int, float]) -> None:
    """Forget the children that have ended, and kill those whose time is over: their user may have stopped them."""
    for pid, ends in list(children.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del children[pid]
        elif time.monotonic() > ends:
            os.kill(pid, signal.SIGKILL)


def _serve(user: dict[str, object], stream: socket.socket) -> None:
    _become(user)
    stream.settimeout(LONGEST_S)
    with stream.makefile("rwb") as file:
        request = json.loads(file.readline(1 << 16))
        data = b""
        try:
            if request["verb"] == "read":
                data = read(request["path"], request["offset"], request["most"])
            else:
                create(request["path"], file.read(request["bytes"]))
            number = None
        except OSError as exc:
            number = exc.errno
        except ValueError:
            number = errno.EINVAL  # a path with a NUL
        file.write(json.dumps({"errno": number}).encode() + b"\n" + data)


def _become(user: dict[str, object]) -> None:
    """Take the rights of a user, for good: all three ids, the groups, and with that no capability but root's."""
    uid, gid, groups = user["uid"], user["gid"], user["groups"]
    assert isinstance(uid, int)
    assert isinstance(gid, int)
    assert isinstance(groups, list)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    assert os.getresuid() == (uid, uid, uid)


def read(path: str, offset: int, most: int) -> bytes:
    """Read at most `most` bytes of a regular file from an offset. OSError, also if it is no regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    pieces: list[bytes] = []
    while most > 0 and (piece := os.pread(fd, min(most, _PIECE_BYTES), offset)):
        pieces.append(piece)
        offset, most = offset + len(piece), most - len(piece)
    return b"".join(pieces)


def create(path: str, data: bytes) -> None:
    """A new file with this content, durable. OSError; FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]))
