"""What the command line says when it is used wrongly, where its options may stand, and what it imports."""

from __future__ import annotations

import fcntl
import importlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from snapshotd.cli.command import CliContext
from snapshotd.cli.main import cli as group
from snapshotd.cli.main import find_commands, main, summary_of
from snapshotd.cli.reference import _walk, reference
from snapshotd.cli.text import ago, printable, size
from snapshotd.cli.values import Size
from tests import long
from tests.own_sources import texts
from tests.unit.cli.conftest import Cli
from tests.unit.daemon.process import Daemon, environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["nope"], 2, "no such command"),
        (["frok"], 2, "did you mean 'fork'?; `snapshotd --help`"),
        (["lgo"], 2, "did you mean 'log'?; `snapshotd --help`"),
        (["token", "craete"], 2, "Did you mean 'create'?"),
        (["ls", "--nope"], 2, "--nope"),
        (["log", "--jsno", "x"], 2, "Did you mean '--json'?"),
        (["log"], 2, "missing argument"),
        (["log", "nobody"], 4, "nobody"),
        (["log", "../etc"], 4, "letters, digits"),
        (["wait", "box", ""], 125, "there is no command ''"),
        (["exec", "nobody", "--", "ls"], 125, "nobody"),
        (["exec", "--nope"], 125, "--nope"),
        (["exec"], 125, "no trajectory"),
        (["exec", "box"], 125, "no command"),
        (["exec", "-q", "--", "box", "ls"], 125, "no trajectory"),
        (["run"], 125, "nothing to run"),
        (["run", "--"], 125, "nothing to run"),
        (["run", "--isolation", "none", "--image", "nothing", "--", "ls"], 125, "an image needs"),
        (["run", "--isolation", "none", "--", "missing"], 127, "no program missing"),
        (["run", "--memory", "lots", "--", "ls"], 125, "such as 512m"),
        (["run", "--memory", "1k", "--", "ls"], 125, "not a size from 16m to 1024t"),
        (["run", "--cpus", "0", "--", "ls"], 125, "0.01"),
        (["run", "--cpus", "nan", "--", "ls"], 125, "0.01"),
        (["run", "--disk", "5", "--", "ls"], 125, "from 16m"),
        (["run", "--pids", "x", "--", "ls"], 125, "whole number"),
        (["run", "--pids", "1", "--", "ls"], 125, "from 8"),
        (["run", "--pids", "²", "--", "ls"], 125, "whole number"),
        (["run", "--pids", "9" * 5000, "--", "ls"], 125, "whole number"),
        (["run", "--memory", "9" * 5000, "--", "ls"], 125, "such as 512m"),
        (["run", "--env", "=x", "--", "ls"], 125, "no name"),
        (["run", "--env", "SURELY_NOT_SET_HERE", "--", "ls"], 125, "not set here"),
        (["run", "--name", "a/b", "--", "ls"], 125, "cannot be a name"),
        (["run", "--runtime", "podman", "--", "ls"], 125, "podman"),
        (["run", "--network", "host", "--", "ls"], 125, "host"),
        (["create", "--image", "nothing"], 125, "an image needs"),
        (["restore", "x"], 2, "--to"),
    ],
)
def test_every_mistake_is_one_line_with_the_right_code(cli: Cli, words: list[str], code: int, sentence: str) -> None:
    done = cli(*words)
    assert done.code == code
    assert done.out == ""
    assert done.err.startswith("snapshotd: ")
    assert done.err.count("\n") == 1
    assert sentence in done.err


@pytest.mark.parametrize(("word", "code"), [("missing", 127), ("blocked", 126), ("crash", 125), ("full", 125)])
def test_exec_has_dockers_codes_and_leaves_no_snapshot(cli: Cli, box: str, word: str, code: int) -> None:
    assert cli("exec", box, "--", word).code == code
    assert len(cli("log", "-q", box).out.split()) == 1


def test_with_json_the_error_is_an_object_too(cli: Cli) -> None:
    done = cli("log", "--json", "nobody")
    assert done.json["error"]["code"] == "NotFound"
    assert done.err == f"snapshotd: {done.json['error']['message']}\n"
    assert cli("fork", "x", "--n", "0", "--json").json["error"]["code"] == "UsageError"
    assert cli("run", "--json", "--bad").json["error"]["code"] == "UsageError"


def test_an_agent_file_is_looked_for_before_anything_starts(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SNAPSHOTD_SOCKET")  # a local daemon
    monkeypatch.setenv("SNAPSHOTD_STATE_DIR", str(tmp_path / "none"))
    agent = tmp_path / "agent.py"
    cases = {
        ("run", str(agent)): "No such file",
        ("run", "ls", "-la"): "`snapshotd run -- ls -la`",
        ("run", "debian:13", "make", "all"): "`snapshotd run --image debian:13 -- make all`",
        ("run", str(tmp_path)): "is a directory",
        ("run", "--workspace", str(tmp_path / "gone"), "--", "ls"): "gone",
        ("run", "--requirements", str(tmp_path / "req"), "--", "ls"): "req",
        ("create", "--workspace", __file__): "Not a directory",
    }
    for words, sentence in cases.items():
        done = cli(*words)
        assert (done.code, sentence in done.err) == (125, True), done.err
    assert not (tmp_path / "none").exists()


def test_global_options_stand_before_or_after_the_name(
    shared_daemon: Daemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPSHOTD_SOCKET", "/nowhere")
    options = ["--state-dir", str(shared_daemon.state_dir), "--socket", str(shared_daemon.socket_path)]
    assert cli("ls").code == 6
    assert cli("ls", *options).code == 0
    assert cli(*options, "ls").code == 0
    assert cli("image", "ls", *options).code == 0
    assert cli("--socket", "/elsewhere", "ls", *options).code == 0, "the one nearer to the command counts"


def test_every_command_takes_the_global_options_has_examples_and_json() -> None:
    for name in find_commands():
        command = importlib.import_module(f"snapshotd.cli.commands.{find_commands()[name]}.{name}").command
        leaves = command.commands.values() if isinstance(command, click.Group) else [command]
        for leaf in leaves:
            options = {option for param in leaf.params for option in param.opts}
            assert {"--state-dir", "--socket"} <= options, name
            assert "--json" in options or name in ("shell", "ui", "mcp", "serve", "login", "logout", "dial"), (
                name
            )  # the shell has standard output; `ui` prints an address; `mcp` and `serve` speak a protocol
            assert leaf.examples, name
            assert all("snapshotd " in line for line in leaf.examples), name


def test_the_overview_says_what_the_commands_say() -> None:
    for name in find_commands():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        assert command.help is not None
        assert command.help.partition("\n")[0] == summary_of(name), name


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), (
        "regenerate it: python -m snapshotd.cli.reference > docs/cli.md"
    )


def test_help_shows_examples(cli: Cli) -> None:
    done = cli("exec", "--help")
    assert done.code == 0
    assert "Examples:\n  snapshotd exec box -- make test\n" in done.out
    assert cli("--help").code == 0


def test_help_has_one_space_behind_each_comma_of_json() -> None:
    """A list of words that has spaces already, or goes on in the next line of the docstring."""
    for name, command in _walk():
        with click.Context(command, info_name=name) as ctx:
            shown = command.get_help(ctx).partition("\nOptions:")[0]
        assert re.findall(r".*(?:,  |[\w\"\]},],[\"{\[]|_[a-z]+,[a-z]).*", shown) == [], name


@pytest.mark.parametrize("name", ["approvals", "check", "journal", "merge", "policy", "prune"])
def test_help_breaks_lists_of_json_words_at_their_commas(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    assert command.help is not None
    words = set(re.findall(r"\w+", command.help))
    shown = click.Context(command, info_name=name, terminal_width=80).get_help()
    assert words - set(re.findall(r"\w+", shown)) == set()


def test_help_breaks_no_word_at_its_hyphen() -> None:
    """It could be the name of a command or an option."""
    context = CliContext(group, info_name="snapshotd")
    for name in find_commands():
        command = group.get_command(context, name)
        leaves = command.commands.values() if isinstance(command, click.Group) else ()
        for one in (group, command, *leaves):
            assert one is not None
            for width in range(50, 111, long.size(12, 3)):
                shown = one.context_class(
                    one, info_name=one.name, terminal_width=width, max_content_width=width
                ).get_help()
                assert "\N{NON-BREAKING HYPHEN}" not in shown
                own = shown.partition("\nExamples:")[0]  # command lines are as they are
                assert not re.search(r"\w-$", own, re.MULTILINE), (one.name, width, shown)


def test_no_message_points_to_a_command_that_does_not_exist() -> None:
    known = find_commands().keys()
    said = {
        (file, word)
        for file, text in texts().items()
        for word in re.findall(r"`snapshotd ([a-z][a-z-]*)\b", text)
        if word not in known
    }
    assert said == set()
    groups = {name: group.get_command(click.Context(group), name) for name in find_commands()}
    for file, text in texts().items():
        for name, child in re.findall(r"`snapshotd (image|store|hooks|experiment) ([a-z]+)\b", text):
            one = groups[name]
            assert isinstance(one, click.Group)
            assert child in one.commands, (file, name, child)


def test_no_daemon(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["daemon", "--status", "--state-dir", str(tmp_path)]) == 9
    assert main(["daemon", "--stop", "--state-dir", str(tmp_path)]) == 9
    assert "none to stop" in capfd.readouterr().err
    assert main(["version", "--state-dir", str(tmp_path)]) == 0


def test_daemon_stop_waits_for_its_end(daemon: Daemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["daemon", "--stop", "--json", "--state-dir", str(daemon.state_dir)]) == 0
    assert json.loads(capfd.readouterr().out) == {"stopped": daemon.process.pid}
    assert daemon.process.wait(60) == 0


def start(daemon: Daemon, *words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "snapshotd", *words]
    return subprocess.Popen(argv, env=environment(daemon), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def eventually(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


WORKING = ("run", "--isolation", "none", "--", "sh", "-c", "echo working; exec forever")


def test_ctrl_c_stops_a_run_and_waits_for_its_last_snapshot(daemon: Daemon) -> None:
    with start(daemon, *WORKING) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"working\n"
        running.send_signal(signal.SIGINT)
        err = running.stderr.read().decode()
        assert running.wait(60) == 130
    assert "interrupt again to leave at once" in err
    assert "■ stopped, 1 snapshot" in err
    assert [item.status for item in daemon.client.trajectories()] == ["stopped"]


def test_ctrl_c_leaves_a_command_running(daemon: Daemon, short_dir: Path) -> None:
    daemon.client.create(name="box")
    go = short_dir / "go"
    with start(daemon, "exec", "box", "--", "await", str(go)) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"waiting\n"
        running.send_signal(signal.SIGINT)
        assert "goes on in box" in running.stderr.read().decode()
        assert running.wait(60) == 130
    go.touch()
    eventually(lambda: len(daemon.client.log("box")) == 2)


def test_daemon_killed_in_the_middle_of_a_run(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSHOTD_RECONNECT_S", "0")
    with start(daemon, *WORKING) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"working\n"
        daemon.kill()
        last = running.stderr.read().decode().splitlines()[-1]
        assert running.wait(60) == 125
    assert last.startswith("snapshotd: the daemon went away")
    assert "safe" in last


def test_a_reader_that_goes_away_is_no_error_of_ours(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    daemon.client.exec("box", ["sh", "-c", "yes | head -c 3000000 > long"])
    with start(daemon, "cat", "box:long") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        fcntl.fcntl(running.stdout, fcntl.F_SETPIPE_SZ, 4096)  # so that not all of it fits before we go away
        assert running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 141
    with start(daemon, "exec", "box", "--", "yes") as running:
        assert running.stdout is not None
        running.stdout.read(10)
        running.stdout.close()
        assert running.wait(60) == 141, "the command's own exit code: its reader went away, too"


def test_no_space_for_the_output(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    daemon.client.exec("box", ["sh", "-c", "echo hello > a.txt"])
    cases = [
        (125, ["exec", "box", "--", "bytes", "100000"]),
        (125, ["exec", "--json", "box", "--", "bytes", "10"]),
        (125, ["run", "--name", "ran", "--", "bytes", "10"]),
        (125, ["attach", "ran"]),
        (125, ["attach", "--json", "ran"]),
        (125, ["attach", "--help"]),
        (12, ["cat", "box:a.txt"]),
        (12, ["export", "box"]),
        (12, ["ls"]),
        (12, ["ls", "--json"]),
        (12, ["--help"]),
        (12, ["--version"]),
        (12, ["ls", "--help"]),
    ]
    for code, words in cases:
        with open("/dev/full", "wb") as full:
            argv = [sys.executable, "-m", "snapshotd", *words]
            done = subprocess.run(
                argv, env=environment(daemon), stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
            )
        assert done.returncode == code, (words, done.stderr)
        last = done.stderr.decode().splitlines()[-1]
        assert (
            last
            == "snapshotd: the output cannot be written to its end: No space left on device; free some space or send it elsewhere"
        )
        assert b"Traceback" not in done.stderr


def test_output_that_is_closed(daemon: Daemon) -> None:
    for words in (["ls"], ["--version"], ["ls", "--help"]):
        argv = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "snapshotd", *words]
        done = subprocess.run(argv, env=environment(daemon), stderr=subprocess.PIPE, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, b"")


def test_completion_knows_the_daemons_names(daemon: Daemon) -> None:
    daemon.client.create(name="complete-me")
    words = {"_SNAPSHOTD_COMPLETE": "bash_complete", "COMP_WORDS": "snapshotd log comp", "COMP_CWORD": "2"}
    argv = [sys.executable, "-c", "from snapshotd.cli.main import main; main()"]
    done = subprocess.run(
        argv, env={**environment(daemon), **words}, capture_output=True, text=True, check=False, timeout=60
    )
    assert "complete-me" in done.stdout


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--help"], {"snapshotd.client"}),
        (["ls", "--help"], set()),
        (["ls"], set()),
        (["log", "started"], set()),
        (["tag", "started", "v1"], set()),
        (["show", "started"], set()),
        (["rewind", "started", "nowhere"], set()),
    ],
)
def test_what_is_not_needed_is_not_imported(words: list[str], unwanted: set[str], daemon: Daemon) -> None:
    """A short command starts within 100 ms: each of these takes 5 to 60."""
    daemon.client.create(name="started")
    code = f"import sys; from snapshotd.cli.main import main; main({words}); print('\\nLOADED', *sys.modules)"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=environment(daemon), capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.rpartition("LOADED ")[2].split())
    heavy = {"rich", "fastapi", "pydantic", "uvicorn", "docker", "apsw", "asyncio", "subprocess", "multiprocessing"}
    heavy |= {"http.client", "email", "ssl", "hashlib", "tarfile", "snapshotd.types", "tomllib", "snapshotd.service"}
    assert sorted(loaded & (heavy | unwanted)) == []
    own = [name for name in loaded if name.startswith("snapshotd")]
    assert len(own) <= 68, f"a module is 0.3 ms: {sorted(own)}"


def test_a_command_never_searches_what_was_imported_for_garbage(daemon: Daemon) -> None:
    code = "import gc; from snapshotd.__main__ import main; main(); print('\\nGC', gc.isenabled(), gc.get_freeze_count() > 10_000)"
    argv = [sys.executable, "-c", code, "ls"]
    done = subprocess.run(argv, env=environment(daemon), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "GC True True"


def test_names_cannot_command_a_terminal() -> None:
    assert printable("a\x1b[31m\u202eb\n\udcff") == "a\\x1b[31m\\u202eb\\n\\xff"
    assert printable("naïve ☃") == "naïve ☃"


@pytest.mark.parametrize(
    ("text", "count"),
    [("512m", 512 << 20), ("2g", 2 << 30), ("1GiB", 1 << 30), ("64MB", 64 << 20), ("33554432", 32 << 20)],
)
def test_memory_sizes(text: str, count: int) -> None:
    assert Size("16m", "1024t").convert(text, None, None) == count


def test_sizes_and_ages() -> None:
    assert [size(count) for count in (0, 1023, 1024, 1234, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.2 KiB",
        "5.0 TiB",
    ]
    assert ago("2020-01-01T00:00:00.000000Z").endswith("days ago")


@pytest.mark.parametrize("words", [("0",), ("65536",), ("80:65536",), ("80:80:80",), ("80:81", "--unix", "x")])
def test_a_port_is_one_or_two_numbers(cli: Cli, box: str, words: tuple[str, ...]) -> None:
    done = cli("port", box, *words)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
