"""Tests that no branch of the example has seen: how sqlparse splits procedures with CASE."""

import sqlparse

AFTER = "SELECT 1;"


def split(body: str, head: str = "CREATE PROCEDURE p() BEGIN") -> int:
    return len(sqlparse.split(f"{head} {body} END; {AFTER}"))


def test_one_case() -> None:
    assert split("SET a = CASE WHEN b THEN 1 END;") == 2


def test_two_cases() -> None:
    assert split("SET a = CASE WHEN b THEN 1 END; SET c = CASE WHEN d THEN 2 END;") == 2


def test_three_cases() -> None:
    assert split("SET a = CASE WHEN b THEN 1 END;" * 3) == 2


def test_no_case() -> None:
    assert split("SET a = 1; SET b = 2;") == 2


def test_case_beside_if() -> None:
    assert split("IF a THEN SET b = CASE WHEN c THEN 1 END; END IF; SET d = 2;") == 2


def test_case_outside_of_a_procedure() -> None:
    assert len(sqlparse.split(f"SELECT CASE WHEN a THEN 1 END FROM t; {AFTER}")) == 2


def test_two_procedures() -> None:
    one = "CREATE PROCEDURE p() BEGIN SET a = CASE WHEN b THEN 1 END; END;"
    assert len(sqlparse.split(one + one)) == 2
