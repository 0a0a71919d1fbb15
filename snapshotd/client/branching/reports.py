"""A command in a throw-away fork with a JUnit report: its own, which goes away with the fork otherwise, or one that tells
of the command as of one test."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snapshotd.api.commands import CommandOptions
from snapshotd.client.feeding import Readable
from snapshotd.client.local.arguments import local_path, texts_of
from snapshotd.client.local.part_file import part_file
from snapshotd.client.results import ExecInfo
from snapshotd.errors import UsageError
from snapshotd.junit import REPORT_MAX_BYTES, count_tests
from snapshotd.scores import REPORT_PATH, REPORT_VARIABLE

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

_IN_FORK = """
mark=$1 report=${SNAPSHOTD_ROOT-}$2 most=$3; shift 3
rm -rf -- "$report"
command -v "$1" >/dev/null || exec "$@"
"$@"
code=$?
[ -f "$report" ] && { printf %s "$mark"; head -c "$most" < "$report"; }
exit $code
"""
"""In a plain folder, the fork is below $SNAPSHOTD_ROOT. The report comes behind the mark, on standard output. The command
could write a mark and a report of its own; it writes the report anyway."""
_KEPT_BYTES = 64 << 10
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def exec_reported(
    client: Snapshotd,
    ref: str,
    argv: Sequence[str],
    to: str | Path,
    on_output: Callable[[Literal["stdout", "stderr"], bytes], object] | None,
    stdin: Readable | None,
    options: CommandOptions,
) -> ExecInfo:
    """See `Snapshotd.exec_junit`."""
    if not argv:
        raise UsageError("there is no command to execute: the list of its words is empty")
    taken = TakenOutput(secrets.token_hex(16).encode(), on_output)
    wrapped = ["/bin/sh", "-c", _IN_FORK, "exec", taken.mark.decode(), REPORT_PATH, str(REPORT_MAX_BYTES + 1), *argv]
    with part_file(local_path(to)) as write:
        options["env"] = {REPORT_VARIABLE: REPORT_PATH, **texts_of("env", options.get("env"))}
        done = client.exec_snapshot(ref, wrapped, on_output=taken.add, stdin=stdin, **options)
        taken.end()
        write(_report(taken, ref, argv, done))
    return done


class TakenOutput:
    """Passes output on up to the mark, and keeps the end of it, and what comes behind the mark."""

    def __init__(self, mark: bytes, on_output: Callable[[Literal["stdout", "stderr"], bytes], object] | None) -> None:
        self.mark, self._on_output = mark, on_output
        self._held, self._last = b"", bytearray()
        self.report: bytearray | None = None

    def add(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if stream == "stdout":
            if self.report is not None:
                self.report += data
                del self.report[REPORT_MAX_BYTES + 1 :]
                return
            data, found, behind = (self._held + data).partition(self.mark)
            keep = 0 if found else self._length_of_mark(data)
            self._held = data[len(data) - keep :]
            data = data[: len(data) - keep]
            if found:
                self.report = bytearray(behind)
        self._pass(stream, data)

    def _length_of_mark(self, data: bytes) -> int:
        """Length of the longest end of `data` that the mark begins with."""
        return next(
            size
            for size in range(min(len(self.mark), len(data)), -1, -1)
            if self.mark.startswith(data[len(data) - size :])
        )

    def end(self) -> None:
        self._pass("stdout", self._held)
        self._held = b""

    def _pass(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        if not data:
            return
        self._last += data
        del self._last[:-_KEPT_BYTES]
        if self._on_output is not None:
            self._on_output(stream, data)

    @property
    def text(self) -> str:
        return self._last.decode(errors="replace")


def _report(taken: TakenOutput, ref: str, argv: Sequence[str], done: ExecInfo) -> bytes:
    wrong = ""
    if taken.report is not None:
        try:
            count_tests(bytes(taken.report))
            return bytes(taken.report)
        except UsageError as exc:
            wrong = exc.message
    return one_case(ref, argv, done, taken.text, wrong)


def one_case(ref: str, argv: Sequence[str], done: ExecInfo, output: str, wrong: str = "") -> bytes:
    """The command as one test, passed if it ended with exit code 0. `wrong`: why its own report is not here."""
    from xml.etree import ElementTree as Xml

    failed, seconds = done.exit_code != 0, f"{done.call.duration_ms / 1000:.3f}"
    counts = {
        "tests": "1",
        "failures": str(int(failed)),
        "errors": str(int(bool(wrong) and not failed)),
        "time": seconds,
    }
    suite = Xml.Element("testsuite", {"name": "snapshotd exec", **counts})
    case = Xml.SubElement(suite, "testcase", {"classname": _xml(ref), "name": _xml(shlex.join(argv)), "time": seconds})
    if failed:
        why = "timed out" if done.call.status == "timed-out" else f"exit code {done.exit_code}"
        Xml.SubElement(case, "failure", {"message": _xml(f"{why}; {wrong}" if wrong else why)})
    elif wrong:
        Xml.SubElement(case, "error", {"message": _xml(wrong)})
    Xml.SubElement(case, "system-out").text = _xml(output)
    root = Xml.Element("testsuites")
    root.append(suite)
    text: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return text


def _xml(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return _NOT_XML.sub("\ufffd", text)
