"""The file that declares services."""

from __future__ import annotations

import pytest

from snapshotd import service as declarations
from snapshotd.errors import LimitExceeded, UsageError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[services.web", "cannot be read as TOML"),
        ("[other]\n", "has the key 'other'"),
        ("services = 3\n", "is no table"),
        ("[services]\nweb = 3\n", "is no table"),
        ("[services.web]\n", "needs a command"),
        ("[services.web]\ncommand = [1]\n", "needs a command"),
        ('[services.web]\ncommand = "x"\nredy = "y"\n', "did you mean 'ready'"),
        ('[services.web]\ncommand = "x"\nport = "y"\n', "port of the service web is a whole number"),
        ('[services.web]\ncommand = "x"\nport = true\n', "port of the service web is a whole number"),
        ('[services.web]\ncommand = "x"\nport = 70000\n', "ports are from 1 to 65535"),
        ('[services.web]\ncommand = "x"\nready_timeout = -1\n', "seconds at most"),
        ('[services.web]\ncommand = "x"\nready_timeout = nan\n', "seconds at most"),
        ('[services.web]\ncommand = "x"\nrestarts = -1\n', "0 to 1000 times"),
        ('[services.web]\ncommand = "x"\nenv = { A = 1 }\n', "is no table of texts"),
        ('[services."a b"]\ncommand = "x"\n', "cannot be the name of a service"),
        ('[services.web]\ncommand = "x"\nport = 0x' + "f" * 5000 + "\n", "too large"),
        ('[services.web]\ncommand = "x"\nrestarts = ' + "9" * 5000 + "\n", "cannot be read"),
        ('[services.web]\ncommand = "x"\nready_timeout = 1' + "0" * 400 + "\n", "too large"),
        ('[services.web]\ncommand = "x"\n' + "cwd." * 990 + "a = 1\n", "cwd of the service web is a text"),
        ("x = " + "[" * 9000 + "\n", "cannot be read"),
        ("[services.abcd]\ncommand = 'x'\n", "could be taken for the id"),
    ],
)
def test_a_malformed_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        declarations.parse(text, "services.toml")


def test_a_file_is_bounded() -> None:
    with pytest.raises(LimitExceeded, match="17 services"):
        declarations.parse("".join(f'[services.s{n}]\ncommand = "x"\n' for n in range(17)), "services.toml")
    with pytest.raises(LimitExceeded, match="bytes"):
        declarations.parse("#" * (64 << 10) + "\n", "services.toml")
    with pytest.raises(LimitExceeded, match="dots"):
        declarations.parse("a." * 30_000 + "a = 1\n", "services.toml")


def test_a_service_is_read_back_as_it_was_written() -> None:
    odd = 'a"b\\c\n\t\x01\x7f é 😀 [secret:x:0123456789abcdef]'
    some = (
        declarations.DeclaredService(
            "web", (odd, "x"), "/a b", (("A", odd), ("B.c", "")), "u:g", odd, 0.25, None, True, 3
        ),
        declarations.DeclaredService("db.1", ("postgres",), port=5432),
    )
    assert declarations.parse(declarations.write(some), "it") == some
