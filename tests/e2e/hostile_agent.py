"""The program of an agent that writes whatever may hurt a page that shows it, into every field that it can reach."""

from __future__ import annotations

TEXT = (
    "<script>window.hacked = 'script'; alert(1)</script><img src=x onerror=\"window.hacked = 'img'\">"
    "<svg onload=\"window.hacked = 'svg'\"></svg><a href=\"javascript:window.hacked = 'link'\">click</a>"
    "<style>*{display:none}</style><iframe src=\"http://evil.example/\"></iframe>' onfocus='window.hacked = 1' x='"
)
"""Markup that runs a script, or asks another machine, where a page takes it for its own."""
CONTROLS = (
    "\x1b]8;;http://evil.example/\x07link\x1b]8;;\x07\x1b]52;c;aGFja2Vk\x07\x1b]0;title\x07\x1b[2J\x1b[5;5H\x1b[8mhidden\x1b[0m"
    "\u202egnp.exe\u202c \u2066isolated\u2069 zero\u200bwidth\ufeff soft\u00adhyphen filler\u3164 tag\U000e0041 \x00\x08\x7f\x9b"
)
"""Controls of terminals, and characters that turn text around or are not seen."""
WIDE = "W" * (1 << 20)
"""A name, a line: a megabyte without a place to break it."""

PROGRAM = (
    f"""
import os, subprocess, sys, zipfile
from snapshotd.agent import message, state, task, tool

TEXT, CONTROLS, WIDE = {TEXT!r}, {CONTROLS!r}, "W" * (1 << 20)
"""
    + r"""
@tool(name=TEXT[:200])
def marked(argument):
    return argument

@tool
def fails(argument):
    raise ValueError(argument)

@tool
def prints(argument):
    return subprocess.run(["printf", "%s", argument], capture_output=True, text=True).stdout

@tool
def write_files():
    for name in (TEXT[:120].replace("/", "|"), "page.html", "page.svg", "page.xhtml", "script.js"):
        with open(name, "w") as file:
            file.write("<html xmlns='http://www.w3.org/1999/xhtml'><svg xmlns='http://www.w3.org/2000/svg'>%s</svg></html>\n" % TEXT)
    with open(b"bytes-\xff\xfe.txt", "wb") as file:
        file.write(b"invalid \xff\xfe\xc0\x80 text\n" + TEXT.encode())
    with open("controls-" + CONTROLS.replace("/", "|").replace("\0", "")[-120:], "w") as file:
        file.write(CONTROLS + "\n")
    with open("name\nof two lines", "w") as file:
        file.write("a\n")
    with open("n" * 255, "w") as file:
        file.write(WIDE)
    os.makedirs("/".join(["deep" * 30] * 20))
    os.symlink("loop-b", "loop-a"), os.symlink("loop-a", "loop-b"), os.symlink(".", "round"), os.symlink("/proc/self/root", "out")
    os.mkfifo("fifo")
    try:
        os.mknod("device", 0o600 | 0o020000, os.makedev(1, 3))
    except OSError:
        pass
    with zipfile.ZipFile("bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        with bomb.open("zeros", "w") as zeros:
            for _ in range(64):
                zeros.write(bytes(1 << 20))
    with zipfile.ZipFile("nested.zip", "w") as nested:
        nested.write("bomb.zip"), nested.writestr("../../../etc/passwd", "root::0:0")

@tool
def write_many():
    os.mkdir("many")
    for number in range(int(sys.argv[1])):
        os.close(os.open("many/%06d" % number, os.O_CREAT))

@tool(approve=TEXT)
def asks(argument):
    return argument

message("user", TEXT + CONTROLS)
message("assistant", [{"type": "text", "text": TEXT}, {"type": "html", "html": TEXT}, {"type": "image", "url": "http://evil.example/x.png"}])
message(TEXT[:30], {"__html": TEXT, "dangerouslySetInnerHTML": {"__html": TEXT}, "__k": 1, "constructor": None})
for role in ("notice bad", "confirm", "away", "menu"):
    message(role, "the page's own words")
state["__proto__"] = TEXT
with task(TEXT[:100]):
    marked({"__html": TEXT, "dangerouslySetInnerHTML": {"__html": TEXT}})
    try:
        fails(TEXT + CONTROLS)
    except ValueError:
        pass
    prints(TEXT + CONTROLS.replace("\0", ""))
    message("assistant", WIDE)
    marked(WIDE)
    write_files()
    write_many()
asks({"to": TEXT, "controls": CONTROLS, "wide": WIDE})
"""
)
CALLS = ("marked", "fails", "prints", "marked of a megabyte", "write_files", "write_many", "task", "approval")
"""The calls of the program up to the one that waits for a person, from number 1 on."""
