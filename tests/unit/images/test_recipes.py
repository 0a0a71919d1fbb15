"""Recipes are parsed strictly, their digest sees everything that matters, and only Debian's own archives are used."""

from __future__ import annotations

import tomllib
from collections import deque
from pathlib import Path

import pytest

from snapshotd.client.local import profiles
from snapshotd.errors import NotFound, OutOfSpace, UsageError
from snapshotd.images import build, recipes
from snapshotd.images.recipes import Mirror, host_mirrors, load_recipe

DEB822 = """\
# the main archive
Types: deb deb-src
URIs: http://user:secret@mirror.example/debian
Suites: trixie trixie-updates trixie-backports
Components: main
# a comment in the middle
Signed-By:
 /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security/
Suites: trixie-security
Components: main

Enabled: no
Types: deb
URIs: http://disabled.example/debian
Suites: trixie

Types: deb-src
URIs: http://source.example/debian
Suites: trixie

Types: deb
URIs: https://other.example/node
Suites: nodistro
Signed-By: /usr/share/keyrings/other.gpg
"""
ONE_LINE = """\
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] https://proxy.example/remote/x bookworm main
deb http://deb.example/debian/ bookworm-updates main contrib # comment
#deb http://commented.example/debian bookworm main
deb-src http://source.example/debian bookworm main
deb http://deb.example/ubuntu jammy main
deb cdrom:[Debian]/ bookworm main
deb [signed-by=/usr/share/keyrings/other.gpg] http://evil.example/debian bookworm main
"""


def test_mirrors_from_both_formats(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(ONE_LINE)
    (tmp_path / "sources.list.d/debian.sources").write_text(DEB822)
    (tmp_path / "sources.list.d/old.list.disabled").write_text("deb http://disabled.example/debian bookworm main")
    (tmp_path / "sources.list.d/garbage.sources").write_text("\0\n  continued\nno colon\n\n\n:\n")
    assert host_mirrors("bookworm", tmp_path) == [
        Mirror("https://proxy.example/remote/x", ("bookworm",)),
        Mirror("http://deb.example/debian", ("bookworm-updates",)),
        Mirror("http://user:secret@mirror.example/debian", ("bookworm", "bookworm-updates")),
        Mirror("http://mirror.example/debian-security", ("bookworm-security",)),
    ]
    assert Mirror("http://user:secret@mirror.example:80/debian", ()).public_uri() == "http://mirror.example:80/debian"


def test_a_machine_without_debian_entries(tmp_path: Path) -> None:
    assert host_mirrors("bookworm", tmp_path / "missing") == []


def test_shipped_recipes_are_well_formed() -> None:
    assert set(recipes.shipped()) == {"claude", "codex", "default", "essential", "minimal", "node"}
    for name in recipes.shipped():
        assert recipes.find_recipe(name).name == name


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_an_agents_image_has_the_version_of_its_profile(name: str) -> None:
    package = tomllib.loads((profiles.SHIPPED / f"{name}.toml").read_text())["npm"].removesuffix("-linux-{npm_arch}")
    customize = (recipes.shipped()[name] / "customize").read_text()
    assert f'@{package.rpartition("@")[2]}"' in customize


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("suite = ", "cannot be read"),
        ("colour = 1", "unknown key colour"),
        ('variant = "huge"', "variant must be"),
        ('suite = "../x"', "suite must be"),
        ('packages = ["a b"]', "packages must be"),
        ('variant = "machine"\npackages = ["git"]', "has no packages"),
        ('packages = ["--hook=x"]', "packages must be"),
        ('packages = "git"', "packages must be"),
        ("env = 1", "env must be"),
        ('env = {"A=B" = "c"}', "env must be"),
        ('workdir = "relative"', "workdir must be"),
    ],
)
def test_malformed_recipes(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "image.toml").write_text(text)
    with pytest.raises(UsageError, match=match):
        load_recipe(tmp_path)


def test_missing_recipes(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="default, essential, minimal"):
        recipes.find_recipe(str(tmp_path))


def test_the_digest_sees_all_that_decides_the_image(tmp_path: Path) -> None:
    (tmp_path / "image.toml").write_text("")
    seen = {load_recipe(tmp_path).source_id}

    def changed() -> None:
        digest = load_recipe(tmp_path).source_id
        assert digest not in seen
        seen.add(digest)

    (tmp_path / "files").mkdir()
    (tmp_path / "files/a").write_text("1")
    changed()
    (tmp_path / "files/a").chmod(0o755)
    changed()
    (tmp_path / "files/a").rename(tmp_path / "files/b")
    changed()
    (tmp_path / "files/c").symlink_to("b")
    changed()
    (tmp_path / "customize").write_text("#!/bin/sh\n")
    changed()
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "files/b").chmod(0o711)
    assert load_recipe(tmp_path).source_id in seen


def test_a_customize_script_that_fails_shows_what_it_printed_last(tmp_path: Path) -> None:
    (tmp_path / "image.toml").write_text("")
    printed = [f"line {number}" for number in range(9)]
    lines = deque(
        [*printed, f"E: setup failed: E: command failed: {build._CUSTOMIZE_HOOK}", "E: mmdebstrap failed to run"]
    )
    message = build._failure(load_recipe(tmp_path), lines).message
    assert "customize" in message
    assert "line 4 / line 5 / line 6 / line 7 / line 8" in message
    assert "line 3" not in message
    assert "install -m" not in message


def test_a_failed_build_says_why_without_passwords(tmp_path: Path) -> None:
    (tmp_path / "image.toml").write_text("")
    lines = deque(
        ["E: setup failed", "E: apt-get update failed", "E: http://user:secret@mirror.example/debian is unreachable"]
    )
    message = build._failure(load_recipe(tmp_path), lines).message
    assert "mirror.example/debian is unreachable" in message
    assert "secret" not in message


@pytest.mark.parametrize(
    "line",
    [
        "E: Write error - write (28: No space left on device)",
        "dpkg: error processing archive a.deb (--unpack): failed to write (No space left on device)",
        "E: You don't have enough free space in /var/cache/apt/archives/.",
    ],
)
def test_a_full_disk_is_not_blamed_on_the_mirror(tmp_path: Path, line: str) -> None:
    (tmp_path / "image.toml").write_text('packages = ["bash"]\n')
    failure = build._failure(load_recipe(tmp_path), deque([line, "E: apt-get failed", "E: mmdebstrap failed to run"]))
    assert isinstance(failure, OutOfSpace)
    assert "the disk is full" in failure.message
    assert "mirror" not in failure.message
