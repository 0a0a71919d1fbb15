"""The page's modules as one script, in the order in which a browser would run them: a browser asks for one file instead of
thirty, one import behind the other. And the page as one HTML file, with its style, and data in place of a daemon.

All modules share one scope, so a name at the top of one must not be at the top of another (a browser refuses such a file,
and so the test of the export fails).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from typing import Any

_STATIC = files("snapshotd.page") / "static"
_IMPORT = re.compile(r'^import (?:\{[^}]*\}|\w+) from "\./([\w/.-]+)";\n', re.MULTILINE)
_EXPORT_NAMES = re.compile(r"export\s*\{([^}]*)\};?")
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|class|function)\b)", re.MULTILINE)
_REEXPORT = re.compile(r"^export \{[^}]*\};\n", re.MULTILINE)


def join_page(data: dict[str, Any], title: str) -> str:
    """The text of the file. `data` is `Saved` in static/saved.js."""
    script = join_script()
    style = (_STATIC / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        f"<title>{html.escape(title, quote=False)}</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        f'<script type="application/json" id="saved">{_json(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    )


def join_script() -> str:
    """The text of main.js and of all that it imports, each behind what it imports itself."""
    joined: dict[str, str] = {}
    begun: set[str] = set()

    def add(name: str) -> None:
        if name in begun:
            return
        begun.add(name)
        text = (_STATIC / name).read_text()
        for imported in _IMPORT.findall(text):
            add(imported)
        joined[name] = (
            _own_scope(text)
            if name.startswith("vendor/")
            else _EXPORT.sub("", _REEXPORT.sub("", _IMPORT.sub("", text)))
        )

    add("main.js")
    script = "\n".join(joined.values())
    # A script ends where a browser reads one of these, in a string too.
    return re.sub(r"<(?=/script|script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _own_scope(text: str) -> str:
    """Wrap a library, so that its short names stay its own: `const {exported} = (() => {...})()`."""
    if default := re.search(r"export default ", text):
        return (
            f"const htm = (() => {{{text[: default.start()]}return {text[default.end() :].strip().rstrip(';')};}})();"
        )
    found = _EXPORT_NAMES.search(text)
    assert found is not None
    pairs = [part.split(" as ") for part in found[1].split(",")]
    names = {pair[-1].strip(): pair[0].strip() for pair in pairs}
    body = text[: found.start()]
    wanted = [name for name in names if name in _USED]
    members = ", ".join(f"{name}: {names[name]}" for name in wanted)
    return f"const {{{', '.join(wanted)}}} = (() => {{{body}return {{{members}}};}})();"


_USED = ("Component", "h", "render", "batch", "computed", "effect", "signal")
"""Names of the libraries that dom.js imports; their other ones would be in the way."""


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """JSON that ends no script element, whatever is in it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
