"""The program that agents run as their hook: it passes the event on to the daemon, and never stands in an agent's way.

    python3 -I -S send.py SOCKET hook AGENT          the event is on standard input
    python3 -I -S send.py SOCKET VERB [ARGUMENT]...  what a slash command asks for

A hook runs twice for every call, so this imports nothing but modules that the interpreter has built in or loads at
once: `os` and `array` would bring ten others along, and a third of the start's time. The daemon gets a descriptor of
the folder, the words, then standard input; it answers with one byte, the exit code, and the text to print. A hook ends
with 0 whatever happens, with one line on standard error where no snapshot was taken.
"""

import _socket
import posix
import select
import sys

LONGEST_S = 30
"""The longest that an agent waits for the daemon."""
FOLDERS = (b"CLAUDE_PROJECT_DIR", b"GEMINI_PROJECT_DIR")
"""Variables in which agents name the folder they work in. Without one it is the working directory."""


def main(words: list[str]) -> int:
    path, words = words[0], words[1:]
    hook = words[:1] == ["hook"]
    try:
        code, text = ask(path, words, hook)
    except OSError as exc:
        code, text = 1, ("snapshotd: no snapshot: %s\n" % (exc.strerror or exc)).encode()
    if text:
        posix.write(2 if code else 1, text)
    return 0 if hook else code


def ask(path: str, words: list[str], hook: bool) -> tuple[int, bytes]:
    folder = next((posix.environ[name] for name in FOLDERS if posix.environ.get(name)), b".")
    fd = posix.open(folder, posix.O_RDONLY | posix.O_DIRECTORY)
    s = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        s.connect(path)
    except OSError as exc:
        why = exc.strerror or exc
        raise OSError(0, f"no daemon answers at {path} ({why}); any command of snapshotd starts one") from None
    owner = int.from_bytes(s.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[4:8], sys.byteorder)
    if owner not in (0, posix.geteuid()):
        raise OSError(0, f"a program of user {owner} listens at {path}, and nothing was sent to it")
    head = b"\0".join(word.encode(sys.getfilesystemencoding(), "surrogateescape") for word in words) + b"\n"
    s.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))])
    watched: list[int] = [0, s.fileno()] if hook else [s.fileno()]
    answer = b""
    while True:
        ready = select.select(watched, (), (), LONGEST_S)[0]
        if not ready:
            raise OSError(0, "the daemon does not answer")
        if 0 in ready:
            data = posix.read(0, 1 << 18)
            if data:
                s.sendall(data)
            else:
                watched.remove(0)
                s.shutdown(_socket.SHUT_WR)
        if s.fileno() in ready:
            data = s.recv(1 << 16)
            if not data:
                break
            answer += data
    if not answer:
        raise OSError(0, "the daemon has gone")
    return answer[0], answer[1:]


if __name__ == "__main__":
    posix._exit(main(sys.argv[1:]))
