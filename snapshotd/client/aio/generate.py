"""Makes the asynchronous client of the one for threads: `python -P snapshotd/client/aio/generate.py`, in `make docs`.

Every module of `snapshotd/client` with a class or function that talks to the daemon has a counterpart of the same name
here. The parts that meet the operating system are written by hand (`transport.py`, `feeding.py`, `carrying.py`): a class
`AsyncX` in a module without the header of a generated one stands for `X`. From those, the generator finds out which
functions have to wait, by the types of parameters and attributes: their calls get `await`, iterations over an answer
`async for`, and so on. A verb that is marked with `on_this_machine` runs in a thread as it is.

A missing or needless `await` does not pass mypy. A construct without an asynchronous form (an `await` in a lambda) is
an error with its place.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parent
HEADER = '"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/{name}.py`: change that one."""\n\n'
HEADER_START = HEADER.partition("{")[0]

ITER = "an asynchronous iterator"
"""The type of what is iterated over with `async for`."""
PLAIN, WAITS, YIELDS = "plain", "waits", "yields"
"""Kinds of functions: as it is, `async def`, and `async def` with `yield`. A plain one may return an ITER."""
FOR_THREADS = {"autostart", "feeding", "transport"}
"""Modules without a generated counterpart: written by hand for asyncio, or run in a thread."""
_CONSUMERS = ("list", "tuple", "set", "sorted", "dict", "sum", "any", "all", "max", "min")
_RENAMED = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}


@dataclass
class Function:
    """A function or method of the source. `params`: its parameters' types; `returns`: ITER, or the annotated class."""

    node: ast.FunctionDef
    cls: Class | None
    kind: str = PLAIN
    params: dict[str, str | None] = field(default_factory=dict)
    returns: str | None = None

    @property
    def in_thread(self) -> bool:
        return any(isinstance(one, ast.Name) and one.id == "on_this_machine" for one in self.node.decorator_list)

    @property
    def is_property(self) -> bool:
        return any(isinstance(one, ast.Name) and one.id == "property" for one in self.node.decorator_list)


@dataclass
class Class:
    """A class of the source. `hand`: the module with its counterpart, if that is written by hand."""

    name: str
    module: str
    node: ast.ClassDef
    bases: list[str]
    hand: str | None = None
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, str | None] = field(default_factory=dict)


class ClientSource:
    """All modules of the client for threads, and what is known of their functions."""

    def __init__(self) -> None:
        self.modules = {path.stem: ast.parse(path.read_text()) for path in sorted(SOURCES.glob("[a-z]*.py"))}
        self.classes: dict[str, Class] = {}
        self.functions: dict[tuple[str, str], Function] = {}
        self.imported: dict[str, dict[str, str]] = {}
        """Module to its names that come from other modules of the client, and from which."""
        for name, tree in self.modules.items():
            self._read(name, tree)
        for path in sorted(HERE.glob("[a-z]*.py")):
            if path.name != Path(__file__).name and not is_made(path):
                self._read_hand(path)
        self._settle()

    def _read(self, module: str, tree: ast.Module) -> None:
        self.imported[module] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("snapshotd.client."):
                self.imported[module] |= {a.name: str(node.module).rpartition(".")[2] for a in node.names}
            elif isinstance(node, ast.FunctionDef):
                self.functions[module, node.name] = Function(node, None)
            elif isinstance(node, ast.ClassDef):
                cls = Class(node.name, module, node, [b.id for b in node.bases if isinstance(b, ast.Name)])
                cls.methods = {n.name: Function(n, cls) for n in node.body if isinstance(n, ast.FunctionDef)}
                self.classes[node.name] = cls

    def _read_hand(self, path: Path) -> None:
        """Learn from a module that is written by hand what waits, and what is iterated over."""
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.ClassDef) and node.name.startswith("Async")):
                continue
            cls = self.classes.get(node.name.removeprefix("Async"))
            if cls is None:
                continue
            cls.hand = path.stem
            written = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            cls.methods = {name: function for name, function in cls.methods.items() if name in written}
            for name, method in written.items():
                counterpart = next((old for old, new in _RENAMED.items() if new == name), name)
                function = cls.methods.setdefault(counterpart, Function(_plain(method), cls))
                if isinstance(method, ast.AsyncFunctionDef):
                    yields = any(isinstance(n, ast.Yield) for n in ast.walk(method))
                    function.kind, function.returns = (YIELDS, ITER) if yields else (WAITS, None)

    def _settle(self) -> None:
        """Find out the kinds of all functions, until nothing changes any more."""
        every = [*self.functions.values(), *(m for c in self.classes.values() for m in c.methods.values())]
        for function in every:
            arguments = function.node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                function.params[argument.arg] = self.named(argument.annotation)
            function.returns = function.returns or self.named(function.node.returns)
        before = None
        while before != (now := self._state()):
            before = now
            for (module, _), function in self.functions.items():
                self.convert(module, function)
            for cls in self.classes.values():
                if cls.hand is None:
                    for node in cls.node.body:
                        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                            cls.attributes[node.target.id] = self.named(node.annotation)
                    for function in cls.methods.values():
                        self.convert(cls.module, function)
                pair = [cls.methods[name] for name in ("__enter__", "__exit__") if name in cls.methods]
                if any(one.kind == WAITS for one in pair):
                    for one in pair:
                        one.kind = WAITS

    def _state(self) -> str:
        every = [*self.functions.values(), *(m for c in self.classes.values() for m in c.methods.values())]
        return repr([(f.kind, f.params, f.returns) for f in every] + [c.attributes for c in self.classes.values()])

    def convert(self, module: str, function: Function) -> ast.stmt:
        """The counterpart of a function. The types that the converter meets on the way are noted."""
        return _Converter(self, module, function).converted()

    def named(self, annotation: ast.expr | None) -> str | None:
        """The class of ours that an annotation names."""
        if isinstance(annotation, ast.BinOp):
            return self.named(annotation.left) or self.named(annotation.right)
        return annotation.id if isinstance(annotation, ast.Name) and annotation.id in self.classes else None

    def line(self, name: str) -> Iterator[Class]:
        """A class and those above it."""
        if (cls := self.classes.get(name)) is not None:
            yield cls
            for base in cls.bases:
                yield from self.line(base)

    def method(self, name: str, method: str) -> Function | None:
        return next((c.methods[method] for c in self.line(name) if method in c.methods), None)

    def function(self, module: str, name: str) -> Function | None:
        home = self.imported[module].get(name, module)
        return self.functions.get((home, name))

    def made(self, node: ast.stmt, module: str, seen: tuple[str, ...] = ()) -> bool:
        """True if a class or function of a module needs a counterpart: something in it waits, or names what has one."""
        if isinstance(node, ast.ClassDef):
            cls = self.classes[node.name]
            if cls.hand is not None:
                return False
            if any(m.kind != PLAIN or ITER in (m.returns, *m.params.values()) for m in cls.methods.values()):
                return True
        elif isinstance(node, ast.FunctionDef):
            function = self.functions[module, node.name]
            if function.kind != PLAIN or ITER in (function.returns, *function.params.values()):
                return True
        else:
            return False
        return any(
            self.has_counterpart(name, (*seen, node.name)) for name in names_in(node) if name not in (*seen, node.name)
        )

    def has_counterpart(self, name: str, seen: tuple[str, ...] = ()) -> bool:
        """True if a class is another one in the asynchronous client."""
        cls = self.classes.get(name)
        return cls is not None and (cls.hand is not None or self.made(cls.node, cls.module, seen))

    def renamed(self, name: str) -> str:
        return f"Async{name}" if not name.startswith("_") and self.has_counterpart(name) else name


class _Converter(ast.NodeTransformer):
    """Converts one function. `types`: what is known of its local names."""

    def __init__(self, source: ClientSource, module: str, function: Function) -> None:
        self.source, self.module, self.function = source, module, function
        self.types: dict[str, str | None] = dict(function.params)
        self.nested: dict[str, Function] = {}
        self.waits = False
        cls = function.cls
        if cls is not None and function.node.args.args:
            self.types[function.node.args.args[0].arg] = cls.name

    def converted(self) -> ast.stmt:
        function = self.function
        node = copy.deepcopy(function.node)
        if function.in_thread:
            function.kind = WAITS
            return self._in_thread(node)
        body = [self.visit(statement) for statement in node.body]
        node.body = [one for part in body for one in (part if isinstance(part, list) else [part])]
        if any(isinstance(n, ast.Yield) for n in own_nodes(node)):
            if self.waits:
                function.kind, function.returns = YIELDS, ITER
        elif self.waits:
            function.kind = WAITS
        return self.headed(node, function)

    def headed(self, node: ast.FunctionDef, function: Function) -> ast.stmt:
        """The function with its new head."""
        if function.returns == ITER and node.returns is not None:
            node.returns = asynchronous(node.returns)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if function.params.get(argument.arg) == ITER and argument.annotation is not None:
                argument.annotation = asynchronous(argument.annotation)
        if function.kind != PLAIN or (node.name == "__iter__" and function.returns == ITER):
            node.name = _RENAMED.get(node.name, node.name)
        if function.kind == PLAIN:
            return node
        return ast.copy_location(ast.AsyncFunctionDef(**{name: getattr(node, name) for name in node._fields}), node)

    def _in_thread(self, node: ast.FunctionDef) -> ast.stmt:
        cls = self.function.cls
        assert cls is not None
        arguments = node.args
        words: list[ast.expr] = [ast.Name(a.arg) for a in arguments.args[1:]]
        words += [ast.Starred(ast.Name(arguments.vararg.arg))] if arguments.vararg else []
        head = ast.parse(f"whole_verb(self._transport, {cls.name}OfThreads.{node.name})")
        call = head.body[0].value  # type: ignore[attr-defined]
        call.args += words
        call.keywords = [ast.keyword(a.arg, ast.Name(a.arg)) for a in arguments.kwonlyargs]
        node.body = [*node.body[:1], ast.Return(ast.Await(call))]
        node.decorator_list = []
        return self.headed(node, self.function)

    # -- types ---------------------------------------------------------------------------------------------------------

    def type_of(self, node: ast.expr) -> str | None:
        """The class of ours that an expression has, or ITER."""
        if isinstance(node, ast.Name):
            return self.types.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            found = self.source.method(owner, node.attr) if owner else None
            if found is not None and found.is_property:
                return found.returns
            return next(
                (c.attributes[node.attr] for c in self.source.line(owner or "") if node.attr in c.attributes), None
            )
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("iter", "map", "closing") and node.args:
                return ITER if self.iterated(node.args[-1]) else None
            if isinstance(node.func, ast.Name) and (made := self.class_named(node.func.id)):
                return made
            called = self.called(node)
            return None if called is None else called.returns
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.type_of, node.values)), None)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body) or self.type_of(node.orelse)
        if isinstance(node, ast.Await):
            return self.type_of(node.value)
        return None

    def class_named(self, name: str) -> str | None:
        if name == "cls" and self.function.cls is not None:
            return self.function.cls.name
        return name if name in self.source.classes else None

    def called(self, node: ast.Call) -> Function | None:
        if isinstance(node.func, ast.Name):
            name = node.func.id
            made = self.class_named(name)
            if made is not None:
                return self.source.method(made, "__init__")
            return self.nested.get(name) or self.source.function(self.module, name)
        if isinstance(node.func, ast.Attribute):
            value = node.func.value
            owner = self.type_of(value) or (self.class_named(value.id) if isinstance(value, ast.Name) else None)
            return None if owner is None else self.source.method(owner, node.func.attr)
        return None

    def iterated(self, node: ast.expr) -> bool:
        """True if `async for` goes over it."""
        found = self.type_of(node)
        method = None if found in (None, ITER) else self.source.method(str(found), "__iter__")
        return found == ITER or (method is not None and method.returns == ITER)

    def note(self, target: ast.expr, value: ast.expr) -> None:
        """An assignment tells the type of a name, or of an attribute."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self.note(one, other)
        elif isinstance(target, ast.Name):
            self.types[target.id] = self.type_of(value) or self.types.get(target.id)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            cls = self.function.cls
            if cls is not None and (found := self.type_of(value)) is not None:
                cls.attributes[target.attr] = found

    # -- constructs ----------------------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            self.note(target, node.value)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if isinstance(node.target, ast.Name):
            self.types[node.target.id] = self.source.named(node.annotation)
        elif node.value is not None:
            self.note(node.target, node.value)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called, name = self.called(node), node.func.id if isinstance(node.func, ast.Name) else None
        iterators = [self.iterated(argument) for argument in node.args]
        if called is not None:
            self._note_arguments(called, node)
        over = isinstance(node.func, ast.Attribute) and node.func.attr in ("join", "extend")
        self.generic_visit(node)
        if ast.unparse(node.func) == "time.sleep":
            node.func = ast.parse("asyncio.sleep", mode="eval").body
            return self.awaited(node)
        if name == "iter" and any(iterators):
            return node.args[0]
        if name == "next" and any(iterators):
            node.func = ast.Name("anext")
            return self.awaited(node)
        if (name in _CONSUMERS and called is None) or over:
            node.args = [self.listed(a) if i else a for a, i in zip(node.args, iterators, strict=True)]
            if name == "list" and any(iterators):
                return node.args[0]
        return self.awaited(node) if called is not None and called.kind == WAITS else node

    def _note_arguments(self, called: Function, node: ast.Call) -> None:
        """An iterator that is passed on makes the parameter one."""
        names = [a.arg for a in called.node.args.args]
        if called.cls is not None and names and names[0] in ("self", "cls"):
            names = names[1:]
        given = [*zip(names, node.args, strict=False), *((k.arg or "", k.value) for k in node.keywords)]
        for name, value in given:
            if name in called.params and self.iterated(value) and called.params[name] != ITER:
                called.params[name] = ITER

    def awaited(self, node: ast.expr) -> ast.expr:
        self.waits = True
        return ast.copy_location(ast.Await(node), node)

    def listed(self, node: ast.expr) -> ast.expr:
        self.waits = True
        item = ast.Name("item")
        return ast.ListComp(item, [ast.comprehension(item, node, [], 1)])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        owner = self.type_of(node.value)
        found = self.source.method(owner, node.attr) if owner else None
        self.generic_visit(node)
        waits = found is not None and found.is_property and found.kind == WAITS and isinstance(node.ctx, ast.Load)
        return self.awaited(node) if waits else node

    def visit_For(self, node: ast.For) -> ast.AST:
        iterated = self.iterated(node.iter)
        self.generic_visit(node)
        if not iterated:
            return node
        self.waits = True
        return ast.copy_location(ast.AsyncFor(node.target, node.iter, node.body, node.orelse), node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if self.iterated(node.iter):
            node.is_async, self.waits = 1, True
        return self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        self.generic_visit(node)
        waits = any(
            isinstance(n, ast.Await) or (isinstance(n, ast.comprehension) and n.is_async) for n in ast.walk(node)
        )
        return ast.ListComp(node.elt, node.generators) if waits else node

    def visit_With(self, node: ast.With) -> ast.AST:
        kinds = []
        for item in node.items:
            found = self.type_of(item.context_expr)
            if (
                found == ITER
                and isinstance(item.context_expr, ast.Call)
                and ast.unparse(item.context_expr.func) == "closing"
            ):
                item.context_expr.func = ast.Name("aclosing")
            enter = self.source.method(found, "__enter__") if found not in (None, ITER) else None
            kinds.append(found == ITER or (enter is not None and enter.kind == WAITS))
            if isinstance(item.optional_vars, ast.Name):
                self.types[item.optional_vars.id] = found
        self.generic_visit(node)
        if not any(kinds):
            return node
        if not all(kinds):
            raise self.error(node, "a block enters both an asynchronous and another context manager: use two blocks")
        self.waits = True
        return ast.copy_location(ast.AsyncWith(node.items, node.body), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.YieldFrom) and self.iterated(node.value.value):
            iterator = self.visit(node.value.value)
            self.waits = True
            body: list[ast.stmt] = [ast.Expr(ast.Yield(ast.Name("item")))]
            return ast.copy_location(ast.AsyncFor(ast.Name("item"), iterator, body, []), node)
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if node.value is not None and self.type_of(node.value) == ITER:
            self.function.returns = ITER
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        inner = Function(node, None)
        self.nested[node.name] = inner
        converter = _Converter(self.source, self.module, inner)
        converter.types = {**self.types, **converter.types}
        converter.nested = self.nested
        return converter.converted()

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        before, self.waits = self.waits, False
        self.generic_visit(node)
        if self.waits:
            raise self.error(node, "a lambda cannot wait: define a function")
        self.waits = before
        return node

    def error(self, node: ast.AST, why: str) -> SyntaxError:
        return SyntaxError(f"snapshotd/client/{self.module}.py:{getattr(node, 'lineno', 0)}: {why}")


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from own_nodes(node)


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def asynchronous(annotation: ast.expr) -> ast.expr:
    """An annotation with iterators as asynchronous ones."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id in ("Iterator", "Iterable"):
            node.id = f"Async{node.id}"
    return annotation


def _plain(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef:
    return ast.FunctionDef(**{name: getattr(node, name) for name in node._fields})


def is_made(path: Path) -> bool:
    return path.read_text().startswith(HEADER_START)


class _Renamer(ast.NodeTransformer):
    """Gives classes their names in the asynchronous client, in code and in texts."""

    def __init__(self, source: ClientSource) -> None:
        self._source = source
        self._names = re.compile(r"\b(" + "|".join(c for c in source.classes if source.renamed(c) != c) + r")\b")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._source.renamed(node.id)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self._source.renamed(node.name)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = re.sub(r"`[^`]*`", lambda code: self._names.sub(r"Async\1", code[0]), node.value.value)
            return node
        return self.generic_visit(node)


def reached(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """Classes and functions that are public, or that such ones use."""
    named = {node.name: node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    found = {name for name in named if not name.startswith("_")}
    while more := set().union(*(names_in(named[name]) for name in found)) & named.keys() - found:
        found |= more
    return [node for name, node in named.items() if name in found]


def module_text(source: ClientSource, name: str) -> str | None:
    """The counterpart of a module; None if it has none."""
    tree = source.modules[name]
    made = reached([node for node in tree.body if source.made(node, name)])
    if not made:
        return None
    nodes: list[ast.stmt] = []
    for node in made:
        if isinstance(node, ast.ClassDef):
            converted = copy.deepcopy(node)
            methods = source.classes[node.name].methods
            converted.body = [
                _method(source, name, methods[part.name], part) if isinstance(part, ast.FunctionDef) else part
                for part in converted.body
            ]
            nodes.append(converted)
        elif isinstance(node, ast.FunctionDef):
            nodes.append(source.convert(name, source.functions[name, node.name]))
    used = set().union(*(names_in(node) for node in nodes))
    imports = _imports(
        source, name, tree, used, {node.name for node in made if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    )
    body = [_Renamer(source).visit(node) for node in nodes]
    return HEADER.format(name=name) + "\n".join(
        [*imports, "", *(ast.unparse(ast.fix_missing_locations(n)) for n in body)]
    )


def _method(source: ClientSource, module: str, function: Function, node: ast.FunctionDef) -> ast.stmt:
    """The counterpart of a method, or of one of its overloads: those have its kind."""
    if node is function.node or not _is_overload(node):
        return source.convert(module, function)
    return _Converter(source, module, function).headed(copy.deepcopy(node), function)


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def _imports(source: ClientSource, name: str, tree: ast.Module, used: set[str], own: set[str]) -> list[str]:
    """The import statements of a counterpart that uses these names, and defines its own."""
    lines, known = ["from __future__ import annotations"], set(own)
    typing = list[str]()
    for top in tree.body:
        inner = top.body if isinstance(top, ast.If) and ast.unparse(top.test) == "TYPE_CHECKING" else [top]
        for node in inner:
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                called = alias.asname or alias.name
                if called not in used or called in own:
                    continue
                known.add(called)
                module = node.module if isinstance(node, ast.ImportFrom) else None
                (lines if inner[0] is top else typing).append(_import(source, module, alias))
    threads = {word for word in used if word.endswith("OfThreads")}
    lines += ["from snapshotd.client.aio.apart import whole_verb"] if threads else []
    for word in sorted(threads):
        lines.append(f"from snapshotd.client.{name} import {word.removesuffix('OfThreads')} as {word}")
    lines += ["import asyncio"] if "asyncio" in used else []
    lines += ["from contextlib import aclosing"] if "aclosing" in used else []
    for word in sorted(used):
        if word in ("AsyncIterator", "AsyncIterable"):
            lines.append(f"from collections.abc import {word}")
    for node in tree.body:
        for word in sorted(_defined(node) & used - known):
            cls = source.classes.get(word)
            home = f"snapshotd.client.aio.{cls.hand}" if cls is not None and cls.hand else f"snapshotd.client.{name}"
            lines.append(f"from {home} import {source.renamed(word)}")
    if typing:
        lines += ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", *(f"    {line}" for line in typing)]
    return lines


def _import(source: ClientSource, module: str | None, alias: ast.alias) -> str:
    if module is None:
        return f"import {alias.name}"
    cls = source.classes.get(alias.name)
    function = source.functions.get((module.rpartition(".")[2], alias.name))
    if cls is not None and module.startswith("snapshotd.client.") and source.has_counterpart(alias.name):
        return f"from snapshotd.client.aio.{cls.hand or cls.module} import {source.renamed(alias.name)}"
    if (
        function is not None
        and module.startswith("snapshotd.client.")
        and source.made(function.node, module.rpartition(".")[2])
    ):
        module = module.replace("snapshotd.client.", "snapshotd.client.aio.")
    return f"from {module} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return set().union(*(names_in(target) for target in targets)) - set(dir(builtins))


def generate() -> dict[Path, str]:
    """The text of every generated module, formatted."""
    source = ClientSource()
    made: dict[Path, str] = {}
    for name in source.modules.keys() - FOR_THREADS:
        text = module_text(source, name)
        if text is None:
            continue
        made[HERE / f"{name}.py"] = _formatted(text)
    return made


def _formatted(text: str) -> str:
    for command in (["check", "--fix", "--quiet", "--select", "I,F401"], ["format", "--quiet"]):
        argv = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(HERE / "made.py"), "-"]
        text = subprocess.run(
            argv, input=text, capture_output=True, text=True, check=True, cwd=SOURCES.parents[1]
        ).stdout
    return text


def main() -> None:
    made = generate()
    for path in HERE.glob("[a-z]*.py"):
        if path not in made and is_made(path):
            path.unlink()
    for path, text in made.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
