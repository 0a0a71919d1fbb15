"""The rules for calls that need a person: the file `policy.toml` in the state directory (docs/policy.md).

Rules are tried in order and the first that matches decides; if none matches, the call runs without a question. The file
is read again when it has changed. A file that cannot be understood decides nothing: every call that could be gated is
refused until it is mended, with the line that is wrong.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import threading
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from snapshotd.errors import Denied, UsageError
from snapshotd.types import SECONDS, SideEffect

FILE_NAME = "policy.toml"
MAX_BYTES = 1 << 20
MAX_RULES = 1000
MAX_MATCHED_CHARS = 64 << 10
"""Longest text of an argument that is searched for a pattern. A longer one meets no `allow` rule with a pattern on it,
and every other rule with one."""
MAX_PATTERN_CHARS = 1000

Action = Literal["approve", "allow", "deny"]
_ACTIONS = ("approve", "allow", "deny")
_RULE_KEYS = {"name", "arguments", "side_effect", "action", "expires", "reason"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One `[[rule]]`. `name`: of the tool, as a pattern. `arguments`: dotted path to a pattern that its text must contain."""

    action: Action
    name: str = "*"
    arguments: tuple[tuple[str, re.Pattern[str]], ...] = ()
    side_effect: SideEffect | None = None
    expires_s: float | None = None
    reason: str | None = None

    def matches(self, tool: str, arguments: Any, side_effect: SideEffect) -> bool:
        """True if the rule covers this call."""
        if not fnmatch.fnmatchcase(tool, self.name) or self.side_effect not in (None, side_effect):
            return False
        return all(self._contains(pattern, path, arguments) for path, pattern in self.arguments)

    def _contains(self, pattern: re.Pattern[str], path: str, arguments: Any) -> bool:
        text = _text_at(arguments, path)
        if text is None:
            return False
        if len(text) > MAX_MATCHED_CHARS:
            return self.action != "allow"  # a text that cannot be checked whole is never allowed by it
        return pattern.search(text) is not None


@dataclass(frozen=True, slots=True)
class Webhook:
    """The URL at which approvals are announced. `secret`: key of the HMAC over each body; None: not signed."""

    url: str
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """The policy's answer for a call. `reason` is the rule's."""

    action: Action
    expires_s: float | None = None
    reason: str | None = None

    def check(self, tool: str) -> None:
        """Raise Denied if the call of this tool may not run."""
        if self.action == "deny":
            raise Denied(
                f"the policy does not let {tool} run with these arguments" + (f": {self.reason}" if self.reason else "")
            )


@dataclass(frozen=True, slots=True)
class ApprovalPolicy:
    rules: tuple[Rule, ...] = ()
    expires_s: float | None = None
    """Time for which an approval waits if no rule gives one; None: for ever."""
    webhook: Webhook | None = None

    def judge(self, tool: str, arguments: Any, side_effect: SideEffect) -> Ruling:
        """The first matching rule's word; without one the call may run."""
        for rule in self.rules:
            if rule.matches(tool, arguments, side_effect):
                return Ruling(
                    rule.action, rule.expires_s if rule.expires_s is not None else self.expires_s, rule.reason
                )
        return Ruling("allow", self.expires_s)


@dataclass(slots=True)
class PolicyFile:
    """The file of one state directory. Thread-safe."""

    path: Path
    _known: tuple[tuple[int, int, int], ApprovalPolicy | UsageError] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> ApprovalPolicy:
        """The policy in the file now; without a file, no call is gated. UsageError, naming file and line."""
        with self._lock:
            try:
                st = os.stat(self.path)
            except FileNotFoundError:
                self._known = None
                return ApprovalPolicy()
            except OSError as exc:
                raise UsageError(
                    f"the policy {self.path} cannot be read: {exc.strerror}; no call that it may gate can run"
                ) from exc
            stamp = (st.st_mtime_ns, st.st_size, st.st_ino)
            if self._known is None or self._known[0] != stamp:
                self._known = stamp, self._load()
            known = self._known[1]
        if isinstance(known, UsageError):
            raise UsageError(known.message)
        return known

    def _load(self) -> ApprovalPolicy | UsageError:
        try:
            with open(self.path, "rb") as f:
                data = f.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise UsageError(f"the policy {self.path} has more than {MAX_BYTES} bytes; make it shorter")
            return parse(data.decode(), str(self.path))
        except UsageError as exc:
            return exc
        except (OSError, UnicodeDecodeError) as exc:
            return UsageError(f"the policy {self.path} cannot be read: {exc}; no call that it may gate can run")


def parse(text: str, source: str) -> ApprovalPolicy:
    """A policy from its TOML. UsageError naming `source` and the line."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(
            f"the policy {source} is not valid TOML: {exc}; correct it, until then no call that it may gate can run"
        ) from exc
    lines = _rule_lines(text)
    _check_keys(document, {"rule", "defaults", "webhook"}, source, "")
    rules = document.get("rule", [])
    if not isinstance(rules, list) or len(rules) > MAX_RULES or not all(isinstance(rule, dict) for rule in rules):
        raise UsageError(f"the policy {source} must have its rules as at most {MAX_RULES} tables [[rule]]")
    parsed = []
    for index, rule in enumerate(rules):
        where = f", [[rule]] number {index + 1}" + (f" in line {lines[index]}" if index < len(lines) else "")
        parsed.append(_rule(rule, source, where))
    defaults = _table(document, "defaults", {"expires"}, source)
    return ApprovalPolicy(
        tuple(parsed), _duration(defaults.get("expires"), source, ", [defaults]"), _webhook(document, source)
    )


def _rule_lines(text: str) -> list[int]:
    """Line numbers at which the rules begin, for messages."""
    return [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]


def _rule(rule: dict[str, Any], source: str, where: str) -> Rule:
    _check_keys(rule, _RULE_KEYS, source, where)
    action = rule.get("action")
    if action not in _ACTIONS:
        raise _wrong(source, where, f"needs an `action`, one of {', '.join(_ACTIONS)}")
    patterns = rule.get("arguments", {})
    if not isinstance(patterns, dict) or not all(isinstance(p, str) for p in patterns.values()):
        raise _wrong(source, where, "must have `arguments` as a table of patterns")
    effect = _text(rule, "side_effect", source, where)
    if effect is not None and effect not in list(SideEffect):
        raise _wrong(source, where, f"has a `side_effect` that is none of {', '.join(SideEffect)}")
    return Rule(
        action,
        _text(rule, "name", source, where) or "*",
        tuple((path, _pattern(p, source, where)) for path, p in patterns.items()),
        None if effect is None else SideEffect(effect),
        _duration(rule.get("expires"), source, where),
        _text(rule, "reason", source, where),
    )


def _pattern(text: str, source: str, where: str) -> re.Pattern[str]:
    if len(text) > MAX_PATTERN_CHARS:
        raise _wrong(source, where, f"has a pattern of more than {MAX_PATTERN_CHARS} characters")
    try:
        return re.compile(text)
    except re.error as exc:
        raise _wrong(source, where, f"has the pattern {text!r}, which is no regular expression ({exc})") from exc


def _webhook(document: dict[str, Any], source: str) -> Webhook | None:
    table = _table(document, "webhook", {"url", "secret"}, source)
    if "webhook" not in document:
        return None
    url, secret = _text(table, "url", source, ", [webhook]"), _text(table, "secret", source, ", [webhook]")
    if url is None or not re.fullmatch(r"https?://[^\s/]+\S*", url):
        raise _wrong(source, ", [webhook]", "needs a `url` that begins with http:// or https://")
    return Webhook(url, secret)


def _table(document: dict[str, Any], name: str, keys: set[str], source: str) -> dict[str, Any]:
    found = document.get(name, {})
    if not isinstance(found, dict):
        raise _wrong(source, "", f"must have {name} as a table [{name}]")
    _check_keys(found, keys, source, f", [{name}]")
    return found


def _check_keys(table: dict[str, Any], known: set[str], source: str, where: str) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:  # a misspelt key would make a rule match more, or less, than it says
        raise _wrong(source, where, f"has the unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _text(table: dict[str, Any], key: str, source: str, where: str) -> str | None:
    value = table.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise _wrong(source, where, f"must have `{key}` as a text")
    return value


def _duration(value: Any, source: str, where: str) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})([smhdw])", value) if isinstance(value, str) else None
    if found is None or int(found[1]) == 0:
        raise _wrong(source, where, 'must have `expires` as a number with a unit, as in "90s", "30m", "2h" or "7d"')
    return float(int(found[1]) * SECONDS[found[2]])


def _wrong(source: str, where: str, what: str) -> UsageError:
    return UsageError(f"the policy {source}{where} {what}; correct it, until then no call that it may gate can run")


def _text_at(arguments: Any, path: str) -> str | None:
    """The value at a dotted path, as text: a text as it is, anything else as JSON. None: the path leads nowhere. Digits
    index a list; the empty path is the whole."""
    at = arguments
    for part in path.split(".") if path else ():
        if isinstance(at, dict) and part in at:
            at = at[part]
        elif isinstance(at, list) and part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(at):
            at = at[int(part)]
        else:
            return None
    return at if isinstance(at, str) else json.dumps(at, ensure_ascii=False)
