"""JUnit reports from programs that nobody has vetted."""

from __future__ import annotations

import pytest

from snapshotd.client.branching.reports import TakenOutput
from snapshotd.errors import UsageError
from snapshotd.junit import REPORT_MAX_BYTES, JUnitCounts, count_tests


def test_each_case_counts_once() -> None:
    report = b"""<?xml version="1.0" encoding="utf-8"?>
    <testsuites><testsuite tests="99" failures="98">
      <testcase name="a"/><testcase name="b"><system-out>error</system-out></testcase>
      <testcase name="c"><failure message="no"/><error message="teardown"/></testcase>
      <testcase name="d"><error/></testcase><testcase name="e"><skipped/></testcase>
      <error message="of the suite"/>
    </testsuite></testsuites>"""
    assert count_tests(report) == JUnitCounts(passed=2, failed=1, errors=1, skipped=1)


BOMB = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><testsuite>&b;</testsuite>'
OUTSIDE = b'<!DOCTYPE x SYSTEM "file:///etc/passwd"><testsuite/>'


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (b"", "is no XML"),
        (b"<testsuite><testcase>", "is no XML"),
        (b'<?xml version="1.0" encoding="no-such"?><a/>', "is no XML"),
        (b'<?xml version="1.0" encoding="shift_jis"?><a/>', "is no XML"),
        (BOMB, "document type"),
        (OUTSIDE, "document type"),
        (b"<testsuite>" + b" " * REPORT_MAX_BYTES + b"</testsuite>", "larger than 8 MiB"),
    ],
)
def test_a_report_that_is_refused(report: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        count_tests(report)


def test_a_deep_report_is_read() -> None:
    assert count_tests(b"<a>" * 100_000 + b"<testcase/>" + b"</a>" * 100_000).passed == 1


@pytest.mark.parametrize("size", range(1, 40))
@pytest.mark.parametrize(
    ("stream", "output", "report"),
    [
        (b"said\nMARKMARK<r/>", b"said\n", b"<r/>"),
        (b"MAMARKMARK", b"MA", b""),
        (b"MARKMAR", b"MARKMAR", None),
        (b"", b"", None),
        (b"MARKMARK a MARKMARK b", b"", b" a MARKMARK b"),
    ],
)
def test_a_report_is_told_from_output_however_it_is_cut(
    size: int, stream: bytes, output: bytes, report: bytes | None
) -> None:
    said: list[bytes] = []
    taken = TakenOutput(b"MARKMARK", lambda _, data: said.append(data))
    for start in range(0, len(stream), size):
        taken.add("stdout", stream[start : start + size])
    taken.end()
    assert b"".join(said) == output
    assert taken.report == report
