"""The description of an experiment: a TOML file, checked before anything starts, and with the files of this machine that it
names as a request takes it. docs/branching.md has all keys."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.api.wire import QUEUE_MAX
from snapshotd.client.branching.toml_checks import (
    COUNT,
    FLAG,
    NUMBER,
    PARALLEL,
    TABLE,
    TABLE_OF_TEXTS,
    TEXT,
    TEXTS,
    Check,
    TomlText,
    one_of,
)
from snapshotd.client.branching.variant_tables import VARIANT, keywords
from snapshotd.client.branching.variants import variant_fields
from snapshotd.client.local.scorer_files import folder_b64
from snapshotd.errors import UsageError
from snapshotd.scores import SCORE_TIMEOUT_S
from snapshotd.terms import NAME_PATTERN, number_of

NAME_CHARS = 64
KINDS = ("exit", "number", "junit")


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The command that scores a branch, and how its score is read."""

    command: tuple[str, ...]
    kind: str
    report: str | None
    files: str | None
    at: str | None
    env: Mapping[str, str]
    timeout: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """A checked description. `source` is a snapshot, or the fields of a new sandbox. `stop` and `budget` have the keys of
    the file. `prices` are of a million tokens in and out. `folder` is the one that its relative paths begin at."""

    name: str
    source: str | Mapping[str, Any]
    program: tuple[str, ...] | None
    resume: bool
    variants: Mapping[str, Mapping[str, Any]]
    repeat: int
    parallel: int | None
    protected: tuple[str, ...]
    score: ScoreRule
    first_pass: bool
    best_of: int | None
    stop: Mapping[str, float]
    budget: Mapping[str, float]
    prices: tuple[float, float]
    folder: str = ""

    def request(self) -> dict[str, Any]:
        """As the API takes it. Reads the files and the variables of this machine that it names. UsageError,
        LimitExceeded."""
        from snapshotd.client.verbs.runs import sandbox_fields

        rule, source = self.score, self.source
        if not isinstance(source, str):
            place = {"workspace": Path(self.folder, source["workspace"])} if "workspace" in source else {}
            source = sandbox_fields({**source, **place})  # type: ignore[typeddict-item]  # the file was checked
        variants = {label: keywords(label, dict(table), self.folder) for label, table in self.variants.items()}
        return {
            "name": self.name,
            "source": source,
            "variants": variant_fields(variants, QUEUE_MAX),
            "args": None if self.program is None else list(self.program),
            "resume": self.resume,
            "repeat": self.repeat,
            "parallel": self.parallel,
            "protected": list(self.protected),
            "score": {
                "argv": list(rule.command),
                "number": rule.kind == "number",
                "junit": rule.report,
                "files_b64": None if rule.files is None else folder_b64(Path(self.folder, rule.files)),
                "files_path": rule.at,
                "env": dict(rule.env),
                "timeout_s": rule.timeout,
            },
            "first_pass": self.first_pass,
            "best_of": self.best_of,
            "stop": dict(self.stop),
            "budget": dict(self.budget),
            "prices": {"input": self.prices[0], "output": self.prices[1]},
        }


def read_experiment(file: str | Path) -> Experiment:
    """UsageError: it cannot be read, or a key is unknown or has no fitting value; with its line."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no UTF-8"
        raise UsageError(f"the experiment in {file} cannot be read: {reason}") from exc
    return parse_experiment(text, str(file), str(path.resolve().parent), path.stem)


def parse_experiment(text: str, shown: str, folder: str, name: str) -> Experiment:
    """As `read_experiment`. `name` is its name unless the text has one."""
    return _Reader(text, shown).read(folder, name)


_SOURCE: Check = (
    lambda value: isinstance(value, dict) or (isinstance(value, str) and value != ""),
    "a snapshot or a table",
)

_TOP: dict[str, Check] = {
    "name": TEXT,
    "from": _SOURCE,
    "program": TEXTS,
    "resume": FLAG,
    "n": COUNT,
    "variants": TABLE,
    "repeat": COUNT,
    "parallel": PARALLEL,
    "protected": TEXTS,
    "score": TABLE,
    "stop": TABLE,
    "budget": TABLE,
    "prices": TABLE,
}
_FROM: dict[str, Check] = {"image": TEXT, "workspace": TEXT, "runtime": TEXT, "network": TEXT, "env": TABLE_OF_TEXTS}
_SCORE: dict[str, Check] = {
    "command": TEXTS,
    "kind": one_of(*KINDS),
    "report": TEXT,
    "files": TEXT,
    "at": TEXT,
    "env": TABLE_OF_TEXTS,
    "timeout": NUMBER,
}
_BUDGET: dict[str, Check] = {"seconds": NUMBER, "calls": COUNT, "tokens": NUMBER, "cost": NUMBER}
_STOP: dict[str, Check] = {"first_pass": FLAG, "best_of": COUNT, **_BUDGET}
_PRICES: dict[str, Check] = {"input": NUMBER, "output": NUMBER}


class _Reader:
    def __init__(self, text: str, shown: str) -> None:
        self._text, self._toml = text, TomlText(text, shown)

    def read(self, folder: str, name: str) -> Experiment:
        try:
            top = tomllib.loads(self._text)
        except ValueError as exc:
            raise self._toml.refusal(f"the experiment is no TOML: {exc}") from exc
        self._toml.check(top, _TOP)
        given = {key: self._table(top, key, known) for key, known in _TABLES.items()}
        if "from" not in top:
            raise self._toml.refusal("there is no `from`: name the snapshot that all branches begin at, or an image")
        if isinstance(top["from"], dict):
            self._toml.check(top["from"], _FROM, "from")
        variants = self._variants(top)
        if not (top.get("resume") or "program" in top or all("args" in one for one in variants.values())):
            raise self._toml.refusal("the branches have nothing to run: give a `program`, or `resume = true`")
        repeat = top.get("repeat", 1)
        if len(variants) * repeat > QUEUE_MAX:
            raise self._toml.refusal(
                f"{number_of(len(variants) * repeat, 'branch')} are more than {QUEUE_MAX}; repeat fewer times", "repeat"
            )
        name = top.get("name", name)
        self._check_names(name, list(variants), repeat)
        stop, budget, prices = given["stop"], given["budget"], given["prices"]
        if prices == {} and ("cost" in budget or "cost" in stop):
            raise self._toml.refusal("a limit of cost needs [prices] with input and output, of a million tokens")
        return Experiment(
            name=name,
            source=top["from"],
            program=tuple(top["program"]) if "program" in top else None,
            resume=top.get("resume", False),
            variants=variants,
            repeat=repeat,
            parallel=top.get("parallel"),
            protected=tuple(top.get("protected", ())),
            score=self._score(given["score"]),
            first_pass=stop.get("first_pass", False),
            best_of=stop.get("best_of"),
            stop={key: stop[key] for key in _BUDGET if key in stop},
            budget=budget,
            prices=(prices.get("input", 0.0), prices.get("output", 0.0)),
            folder=folder,
        )

    def _table(self, top: dict[str, Any], key: str, known: Mapping[str, Check]) -> dict[str, Any]:
        table: dict[str, Any] = top.get(key, {})
        self._toml.check(table, known, key)
        return table

    def _variants(self, top: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if "variants" not in top:
            return {str(index): {} for index in range(top.get("n", 1))}
        if "n" in top:
            raise self._toml.refusal("there are variants, and each is one branch: leave `n` out, or give `repeat`", "n")
        if not top["variants"]:
            raise self._toml.refusal("there is no variant; write a table for each, such as [variants.cold]", "variants")
        for label, one in top["variants"].items():
            if not isinstance(one, dict):
                raise self._toml.refusal(f"{label} is no variant; write a table, [variants.{label}]", "variants", label)
            self._toml.check(one, VARIANT, "variants", label)
        return dict(top["variants"])

    def _check_names(self, name: str, labels: list[str], repeat: int) -> None:
        for label in labels:
            made = f"{name}.{label}.{repeat - 1}"
            if not NAME_PATTERN.fullmatch(made):
                raise self._toml.refusal(
                    f"a branch would be called {made[:100]!r}, which is no name: names have up to {NAME_CHARS} letters, "
                    "digits, '.', '_' and '-'; change the experiment's `name` or the variant's label",
                    "variants",
                    label,
                )

    def _score(self, given: dict[str, Any]) -> ScoreRule:
        if "command" not in given:
            raise self._toml.refusal(
                "there is no `command` in [score], so the branches could not be told apart", "score"
            )
        kind = given.get("kind", "exit")
        if (kind == "junit") != ("report" in given):
            raise self._toml.refusal(
                'kind = "junit" and a `report` (its path in the branch) go together', "score", "kind"
            )
        if "at" in given and "files" not in given:
            raise self._toml.refusal("`at` is the place of `files`, and there are none", "score", "at")
        return ScoreRule(
            tuple(given["command"]),
            kind,
            given.get("report"),
            given.get("files"),
            given.get("at"),
            given.get("env", {}),
            given.get("timeout", SCORE_TIMEOUT_S),
        )


_TABLES = {"score": _SCORE, "stop": _STOP, "budget": _BUDGET, "prices": _PRICES}
