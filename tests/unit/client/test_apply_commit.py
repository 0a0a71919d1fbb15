"""The git commit that `apply` makes of what it brought."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotd.errors import Conflict, Unsupported, UsageError
from tests.unit.client.folders import Rig

MESSAGE = "Fix it\n\nSnapshotd-Trajectory: t1\nSnapshotd-Snapshot: s1\n"


def git(where: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *args], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(autouse=True)
def _known_to_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gitconfig").write_text("[user]\nname = t\nemail = t@t\n[init]\ndefaultBranch = main\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A folder with a repository, of which a snapshot changed some files."""
    base: dict[str, object] = {
        "a": b"a",
        "gone": b"g",
        "other": b"o",
        "staged": b"s",
        "to-dir": b"f",
        ".gitignore": b"*.pyc\n",
    }
    rig = Rig(tmp_path)
    snapshot = {**base, "a": b"A", "*": b"n", "d/l": "../a", "to-dir": b"", "x.pyc": b"c"}
    del snapshot["gone"], snapshot["to-dir"]
    rig.prepare(base, {**snapshot, "to-dir/in": b"i"}, base)
    git(rig.here, "init", "-q")
    git(rig.here, "add", ".")
    git(rig.here, "commit", "-qm", "first")
    return rig


def test_a_commit_holds_what_was_applied_and_nothing_else(rig: Rig) -> None:
    (rig.here / "other").write_bytes(b"mine, not staged")
    (rig.here / "staged").write_bytes(b"mine, staged")
    git(rig.here, "add", "staged")
    (rig.here / "d").mkdir()
    (rig.here / "d" / "untracked").write_bytes(b"mine")
    done = rig.apply(message=MESSAGE)
    assert done.commit == git(rig.here, "rev-parse", "HEAD").strip()
    assert git(rig.here, "log", "-1", "--format=%B").strip() == MESSAGE.strip()
    assert git(rig.here, "show", "--name-status", "--format=", "--no-renames").splitlines() == [
        "A\t*",
        "M\ta",
        "A\td/l",
        "D\tgone",
        "D\tto-dir",
        "A\tto-dir/in",
    ]
    assert git(rig.here, "status", "--porcelain").splitlines() == [" M other", "M  staged", "?? d/untracked"]
    assert (rig.here / "x.pyc").read_bytes() == b"c", "an ignored file is brought, and not committed"


def test_a_folder_inside_a_repository(rig: Rig) -> None:
    top, rig.here = rig.here, rig.here / "sub"
    rig.here.mkdir()
    for name in ("a", "gone", "to-dir"):
        (rig.here / name).write_bytes((top / name).read_bytes())
    git(top, "add", "--", "sub/a")
    git(top, "commit", "-qm", "second")
    rig.apply(message=MESSAGE)
    names = git(top, "show", "--name-only", "--format=", "-z").rstrip("\0").split("\0")
    assert names == ["sub/*", "sub/a", "sub/d/l", "sub/to-dir/in"]


def test_a_repository_without_a_commit(rig: Rig) -> None:
    subprocess.run(["rm", "-rf", str(rig.here / ".git")], check=True)
    git(rig.here, "init", "-q")
    done = rig.apply(message=MESSAGE)
    assert done.commit == git(rig.here, "rev-parse", "HEAD").strip()
    assert "a" in git(rig.here, "show", "--name-only", "--format=").splitlines()


def test_nothing_to_apply_is_no_commit(rig: Rig) -> None:
    assert rig.apply(message=MESSAGE).commit is not None
    head = git(rig.here, "rev-parse", "HEAD")
    assert rig.apply(message=MESSAGE).commit is None
    assert git(rig.here, "rev-parse", "HEAD") == head


def test_what_head_has_already_is_no_commit(rig: Rig) -> None:
    """The folder is behind its own last commit; applying brings it there."""
    rig.apply(message=MESSAGE)
    head = git(rig.here, "rev-parse", "HEAD")
    (rig.here / "a").write_bytes(b"a")
    done = rig.apply(message=MESSAGE)
    assert ([change.path for change in done.changes], done.commit) == ([b"a"], None)
    assert git(rig.here, "rev-parse", "HEAD") == head
    assert git(rig.here, "status", "--porcelain") == ""


def no_repository(rig: Rig) -> None:
    (rig.here / ".git").rename(rig.directory / "was-git")


def in_a_merge(rig: Rig) -> None:
    (rig.here / ".git" / "MERGE_HEAD").write_text(git(rig.here, "rev-parse", "HEAD"))


def nobody(rig: Rig) -> None:
    (rig.directory / "gitconfig").write_text("[user]\nuseConfigOnly = true\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(no_repository, "not a git repository"), (in_a_merge, "middle of a merge"), (nobody, "user.name")],
)
def test_where_no_commit_can_be_made_nothing_is_applied(rig: Rig, spoil: Callable[[Rig], None], said: str) -> None:
    spoil(rig)
    before = rig.result()
    with pytest.raises(UsageError, match=said):
        rig.apply(message=MESSAGE)
    assert rig.result() == before


def without_a_key(rig: Rig) -> None:
    gpg = script(rig.directory / "gpg", "echo no secret key >&2; exit 2")
    with (rig.directory / "gitconfig").open("a") as file:
        file.write(f"[commit]\ngpgSign = true\n[gpg]\nprogram = {gpg}\n")


def with_a_name_that_git_refuses(rig: Rig) -> None:
    (rig.directory / "snapshot" / "git~1").mkdir()
    (rig.directory / "snapshot" / "git~1" / "config").write_bytes(b"x")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("spoil", "said"), [(without_a_key, "cannot sign"), (with_a_name_that_git_refuses, r"git~1/config.*nothing was")]
)
def test_a_commit_that_git_will_refuse_is_said_before_anything_is_written(
    rig: Rig, spoil: Callable[[Rig], None], said: str, dry_run: bool
) -> None:
    spoil(rig)
    before, objects = rig.result(), git(rig.here, "count-objects", "-v")
    with pytest.raises(UsageError, match=said):
        rig.apply(message=MESSAGE, dry_run=dry_run)
    assert (rig.result(), git(rig.here, "count-objects", "-v")) == (before, objects)


def test_a_signed_commit_is_made(rig: Rig) -> None:
    gpg = script(rig.directory / "gpg", "cat > /dev/null; echo signature; echo '[GNUPG:] SIG_CREATED ' >&2")
    with (rig.directory / "gitconfig").open("a") as file:
        file.write(f"[commit]\ngpgSign = true\n[gpg]\nprogram = {gpg}\n")
    done = rig.apply(message=MESSAGE)
    assert "gpgsig signature" in git(rig.here, "cat-file", "commit", str(done.commit))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Made by a program that the repository names, if it runs."""
    return tmp_path / "ran"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


HOOKS = ("pre-commit", "commit-msg", "prepare-commit-msg", "post-commit", "post-index-change", "reference-transaction")


def with_hooks(rig: Rig, ran: Path) -> None:
    for name in HOOKS:
        script(rig.here / ".git" / "hooks" / name, f"touch {ran}")


def with_hooks_elsewhere(rig: Rig, ran: Path) -> None:
    git(rig.here, "config", "core.hooksPath", "my-hooks")
    script(rig.here / "my-hooks" / "pre-commit", f"touch {ran}")


def with_a_monitor(rig: Rig, ran: Path) -> None:
    git(rig.here, "config", "core.fsmonitor", str(script(rig.directory / "monitor", f"touch {ran}")))


def with_a_monitor_of_a_submodule(rig: Rig, ran: Path) -> None:
    sub = rig.here / "sub"
    sub.mkdir()
    git(sub, "init", "-q")
    git(sub, "commit", "-q", "--allow-empty", "-m", "x")
    git(rig.here, "-c", "advice.addEmbeddedRepo=false", "add", "sub")
    git(rig.here, "commit", "-qm", "sub")
    (sub / "file").touch()
    git(sub, "config", "core.fsmonitor", str(script(rig.directory / "monitor", f"touch {ran}")))


def with_a_missing_object(rig: Rig, ran: Path) -> None:
    """Git would fetch it."""
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::touch {ran}",
        "protocol.ext.allow": "always",
    }.items():
        git(rig.here, "config", name, value)
    tree = git(rig.here, "rev-parse", "HEAD^{tree}").strip()
    (rig.here / ".git" / "objects" / tree[:2] / tree[2:]).unlink()


@pytest.mark.parametrize(
    "prepare", [with_hooks, with_hooks_elsewhere, with_a_monitor, with_a_monitor_of_a_submodule, with_a_missing_object]
)
def test_no_program_that_the_repository_names_runs(rig: Rig, ran: Path, prepare: Callable[[Rig, Path], None]) -> None:
    prepare(rig, ran)
    ran.unlink(missing_ok=True)
    if prepare is with_a_missing_object:
        with pytest.raises(Conflict, match="did not commit them"):
            rig.apply(message=MESSAGE)
    else:
        assert rig.apply(message=MESSAGE).commit is not None
    assert not ran.exists()
    subprocess.run(["git", "-C", str(rig.here), "commit", "-qam", "by the user"], check=False, capture_output=True)
    assert ran.exists(), "git itself would run it, so the test means something"


@pytest.mark.parametrize(
    ("settings", "attributes"),
    [
        ({"filter.x.clean": "touch {ran}; cat"}, "* filter=x\n"),
        ({"filter.x.process": "touch {ran}"}, "* filter=x\n"),
        ({"commit.gpgSign": "true", "gpg.program": "{program}"}, ""),
        ({"commit.gpgSign": "true", "gpg.format": "ssh", "user.signingKey": "/k", "gpg.ssh.program": "{program}"}, ""),
    ],
)
def test_a_commit_that_needs_a_program_of_the_repository_is_refused(
    rig: Rig, ran: Path, settings: dict[str, str], attributes: str
) -> None:
    program = script(rig.directory / "program", f"touch {ran}; exit 1")
    (rig.here / ".git" / "info" / "attributes").write_text(attributes)
    for name, value in settings.items():
        git(rig.here, "config", name, value.format(ran=ran, program=program))
    before = rig.result()
    with pytest.raises(UsageError, match=next(reversed(settings))):
        rig.apply(message=MESSAGE)
    assert rig.result() == before
    assert not ran.exists()
    with contextlib.suppress(Conflict, UsageError):
        rig.apply(message=MESSAGE, hooks=True)
    assert ran.exists()


def test_programs_of_the_users_own_settings_run(rig: Rig, ran: Path) -> None:
    with (rig.directory / "gitconfig").open("a") as config:
        config.write(f'[filter "x"]\nclean = "touch {ran}; tr a-z A-Z"\n')
    (rig.here / ".git" / "info" / "attributes").write_text("to-dir/in filter=x\n")
    assert rig.apply(message=MESSAGE).commit is not None
    assert git(rig.here, "show", "HEAD:to-dir/in") == "I"


def test_a_hook_that_refuses_is_told(rig: Rig) -> None:
    script(rig.here / ".git" / "hooks" / "pre-commit", "echo 'tests fail' >&2; exit 1")
    with pytest.raises(Conflict, match=r"are in .*git did not commit them: tests fail"):
        rig.apply(message=MESSAGE, hooks=True)
    assert (rig.here / "a").read_bytes() == b"A"


def test_settings_of_a_filter_that_the_user_has_may_name_no_program_either(rig: Rig) -> None:
    """`git lfs` runs the extensions that a repository names."""
    git(rig.here, "config", "lfs.extension.x.clean", "true")
    with pytest.raises(UsageError, match=r"lfs\.extension\.x\.clean"):
        rig.apply(message=MESSAGE)


def test_a_folder_that_only_looks_like_a_repository_is_none(rig: Rig) -> None:
    """Git takes it for a bare one, with settings from an agent."""
    sub = rig.here / "sub"
    subprocess.run(["cp", "-r", rig.here / ".git", sub], check=True)
    git(rig.here, "-C", str(sub), "config", "core.worktree", ".")
    rig.here = sub
    with pytest.raises(UsageError, match="cannot use bare repository"):
        rig.apply(message=MESSAGE)


def test_without_git_nothing_is_applied(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(rig.directory))
    with pytest.raises(Unsupported, match="git is not installed"):
        rig.apply(message=MESSAGE)
    assert (rig.here / "a").read_bytes() == b"a"


def test_a_bare_repository_that_an_agent_left_is_not_taken_for_the_users(tmp_path: Path) -> None:
    """Its settings could name a program that git runs."""
    rig = Rig(tmp_path)
    ran = tmp_path / "ran"
    config = f'[core]\nbare = false\nworktree = .\nfsmonitor = "touch {ran}"\nrepositoryformatversion = 0\n'.encode()
    rig.prepare({}, {"HEAD": b"ref: refs/heads/main\n", "config": config, "objects/x": b"", "refs/x": b""}, {})
    top, rig.here = rig.here, rig.here / "sub"
    rig.here.mkdir()
    git(top, "init", "-q")
    assert rig.apply(message=MESSAGE).commit == git(top, "rev-parse", "HEAD").strip()
    subprocess.run(["git", "-C", str(rig.here), "status"], capture_output=True, check=False)
    assert ran.exists(), "git itself takes it for one, so the test means something"
