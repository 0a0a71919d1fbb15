"""JUnit reports: how many test cases passed. A report comes out of a sandbox, so its author may be hostile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from xml.parsers import expat

from snapshotd.errors import UsageError

REPORT_MAX_BYTES = 8 << 20
"""The largest report that is read."""

_Outcome = Literal["passed", "failed", "errors", "skipped"]
_Mark = tuple[str, dict[str, str]]
_MARKS: dict[str, _Outcome] = {"failure": "failed", "error": "errors", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class JUnitCounts:
    """Test cases by outcome."""

    passed: int = 0
    failed: int = 0
    errors: int = 0
    skipped: int = 0

    @property
    def ran(self) -> int:
        return self.passed + self.failed + self.errors

    def __add__(self, other: JUnitCounts) -> JUnitCounts:
        return JUnitCounts(
            self.passed + other.passed,
            self.failed + other.failed,
            self.errors + other.errors,
            self.skipped + other.skipped,
        )


@dataclass(frozen=True, slots=True)
class FailedTest:
    """A test case that failed or ended in an error; what the report does not say is empty."""

    name: str
    message: str
    file: str
    line: str


def count_tests(report: bytes) -> JUnitCounts:
    """The test cases of a report. A case with several marks counts once, by the first.

    UsageError: the report is too large, no XML, or has a document type. A document type is the only place where XML
    declares entities, which grow without bound or name files; no test runner writes one.
    """
    found: dict[_Outcome, int] = dict.fromkeys(("passed", "failed", "errors", "skipped"), 0)

    def count(_case: dict[str, str], mark: _Mark | None) -> None:
        found["passed" if mark is None else _MARKS[mark[0]]] += 1

    _read(report, count)
    return JUnitCounts(**found)


def failed_tests(report: bytes) -> tuple[FailedTest, ...]:
    """The cases that failed, in the order of the report. Errors: as `count_tests`."""
    found: list[FailedTest] = []

    def note(case: dict[str, str], mark: _Mark | None) -> None:
        if mark is not None and _MARKS[mark[0]] != "skipped":
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            found.append(FailedTest(name, mark[1].get("message", ""), case.get("file", ""), case.get("line", "")))

    _read(report, note)
    return tuple(found)


def _read(report: bytes, on_case: Callable[[dict[str, str], _Mark | None], None]) -> None:
    """Tell of the attributes of each test case, and of its first mark. None of them is kept: there may be a million."""
    if len(report) > REPORT_MAX_BYTES:
        raise UsageError(f"the JUnit report is larger than {REPORT_MAX_BYTES >> 20} MiB; write a smaller one")
    open_cases: list[dict[str, str]] = []
    first: list[_Mark] = []
    """The first mark of the outermost case that is open, if it has one."""

    def start(name: str, attributes: dict[str, str]) -> None:
        if name == "testcase":
            open_cases.append(attributes)
        elif open_cases and name in _MARKS and not first:
            first.append((name, attributes))

    def end(name: str) -> None:
        if name == "testcase":
            case = open_cases.pop()
            on_case(case, None if open_cases or not first else first.pop())

    def refuse_doctype(*_: object) -> None:
        raise UsageError("the JUnit report has a document type (<!DOCTYPE), which is not read; write it without")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        parser.Parse(report, True)
    except (expat.ExpatError, ValueError, LookupError) as exc:
        raise UsageError(f"the JUnit report is no XML: {exc}; let the command write one") from exc
