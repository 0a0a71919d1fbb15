"""The description of an experiment: what is taken, and what is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.client.branching.experiment_file import parse_experiment, read_experiment
from snapshotd.errors import UsageError
from snapshotd.scores import ExperimentBranch, ExperimentInfo

GOOD = """\
from = "a1b2c3"
resume = true
repeat = 2

[variants.cold]
env.TEMPERATURE = "0"
[variants.warm]
env = { TEMPERATURE = "1" }
args = ["--log", "{variant}.log"]

[score]
command = ["pytest"]
kind = "junit"
report = "r.xml"
[budget]
seconds = 60
"""


def test_a_whole_description() -> None:
    found = parse_experiment(GOOD, "x.toml", "/where", "x")
    assert (found.name, found.source, found.resume, found.program) == ("x", "a1b2c3", True, None)
    assert found.variants["warm"] == {"env": {"TEMPERATURE": "1"}, "args": ["--log", "{variant}.log"]}
    assert (found.score.kind, found.score.report, found.score.timeout) == ("junit", "r.xml", 600.0)
    asked = found.request()
    assert [one["label"] for one in asked["variants"]] == ["cold", "warm"]
    assert asked["variants"][1]["args"] == ["--log", "{variant}.log"]
    assert (asked["score"]["junit"], asked["score"]["number"], asked["score"]["files_b64"]) == ("r.xml", False, None)
    assert (asked["budget"], asked["stop"], asked["repeat"]) == ({"seconds": 60}, {}, 2)


def test_branches_without_variants() -> None:
    text = 'name = "n"\nfrom = { image = "default", workspace = "." }\nprogram = ["true"]\nn = 3\n[score]\ncommand = ["true"]\n'
    found = parse_experiment(text, "x.toml", "/where", "x")
    assert (found.name, found.source) == ("n", {"image": "default", "workspace": "."})
    asked = found.request()
    assert [one["label"] for one in asked["variants"]] == ["0", "1", "2"]
    assert (asked["source"]["image"], asked["source"]["workspace"]) == ("default", "/where")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("repeat", "repaet", "x.toml:3: there is no key 'repaet'; did you mean 'repeat'?"),
        ("repeat = 2", "parallel = 257", "x.toml:3: parallel is not a whole number from 1 to 256"),
        ("repeat = 2", "repeat = true", "x.toml:3: repeat is not a whole number"),
        ("repeat = 2", "repeat = 9999", "x.toml:3: 19998 branches are more than 10000"),
        ("env = {", "envs = {", "x.toml:8: there is no key 'envs' of variants.warm; did you mean 'env'?"),
        ('"1" }', "1 }", "x.toml:8: env of variants.warm is not a table of texts"),
        ("[variants.cold]", "n = 2\n[variants.cold]", "x.toml:5: there are variants"),
        (
            "env.TEMPERATURE",
            "zzz.TEMPERATURE",
            "there is no key 'zzz' of variants.cold; known are args, cpus, disk, drop_messages, drop_state, env, files",
        ),
        ("[variants.cold]", f"[variants.{'c' * 70}]", "is no name"),
        ('kind = "junit"', 'kind = "exit"', "x.toml:13: kind"),
        ('report = "r.xml"', 'report = "r.xml"\nat = "/x"', "`at` is the place of `files`"),
        ('command = ["pytest"]', "command = []", "x.toml:12: command of score is not a list of texts"),
        ('command = ["pytest"]\n', "", "there is no `command` in [score]"),
        ("seconds = 60", "seconds = -1", "x.toml:16: seconds of budget is not a number above 0"),
        ("seconds = 60", "seconds = inf", "x.toml:16: seconds of budget is not a number above 0"),
        ('from = "a1b2c3"', "", "there is no `from`"),
        (
            'from = "a1b2c3"',
            'from = { imgae = "x" }',
            "x.toml:1: there is no key 'imgae' of from; did you mean 'image'?",
        ),
        ("resume = true", "resume = tru", "no TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as refused:
        parse_experiment(GOOD.replace(old, new, 1), "x.toml", "/where", "x")
    assert said in refused.value.message
    assert refused.value.message.endswith("nothing was started")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name in ("absent.toml", "binary.toml"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_experiment(tmp_path / name)


def test_the_best_branch_passed_and_broke_no_rule() -> None:
    branches = (
        ExperimentBranch("a", 0, "scored", score=1.0, calls=3, protected=("/workspace/tests/x",)),
        ExperimentBranch("a", 1, "scored", score=0.5, calls=1),
        ExperimentBranch("b", 0, "scored", score=0.9, passed=True, calls=9),
        ExperimentBranch("b", 1, "scored", score=0.9, passed=True, calls=8),
        ExperimentBranch("c", 0, "failed", error="it used more than its budget of 3 seconds"),
        ExperimentBranch("c", 1, "running"),
    )
    info = ExperimentInfo("x", "s" * 32, "2026-01-01T00:00:00+00:00", None, branches)
    assert info.best == branches[3]
    rows = {one.label: one for one in info.variants}
    assert [(rows[label].rank, rows[label].scores.mean) for label in "abc"] == [(2, 0.75), (1, 0.9), (None, None)]
    assert rows["b"].scores.pass_at(1) == 1
    assert rows["c"].scores.pass_at(1) == 0
    assert len(rows["c"].scores.runs) == 1, "one that runs has no part in it"


def test_of_variants_with_the_same_mean_the_one_with_the_best_branch_is_first() -> None:
    """The table's first row and the line `best:` agree."""
    branches = (
        ExperimentBranch("zero", 0, "scored", score=1.0, passed=True, calls=3),
        ExperimentBranch("hint", 0, "scored", score=1.0, calls=1),
        ExperimentBranch("guard", 0, "scored", score=1.0, passed=True, calls=2),
        ExperimentBranch("broken", 0, "failed", error="no"),
    )
    info = ExperimentInfo("x", "s" * 32, "2026-01-01T00:00:00+00:00", None, branches)
    assert [(one.label, one.rank) for one in info.variants] == [
        ("guard", 1),
        ("zero", 1),
        ("hint", 1),
        ("broken", None),
    ]
    assert info.best is not None
    assert info.best.label == info.variants[0].label
