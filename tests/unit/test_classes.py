"""The size of classes, and the place where their fields change: a class with behaviour has a bounded number of fields,
and its own module alone assigns them.

A *record* is exempt, because its fields are its purpose: a frozen dataclass, a NamedTuple, an enum, a wire model, and
any class without methods other than properties, class methods and `__` methods.

The types of variables come from annotations and calls, as far as they name one class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest

from tests.own_sources import no_collection, texts, trees, walk

MOST_FIELDS = 15
RECORDS = frozenset({"NamedTuple", "TypedDict", "Protocol", "Enum", "IntEnum", "StrEnum", "IntFlag", "BaseModel"})

LARGE: dict[str, int] = {}
"""`file:Class` to its number of fields, for classes that are still too large."""

ASSIGNED: frozenset[str] = frozenset()
"""`file: Class.field` for fields that are still assigned from outside the class's module."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Class:
    file: str
    name: str
    bases: list[str]
    record: bool
    fields: dict[str, str] = field(default_factory=dict)
    """Name to the name of its class; "" if no annotation names one."""
    returns: dict[str, str] = field(default_factory=dict)
    """Method to the name of the class that it returns."""


@dataclass
class Module:
    file: str
    tree: ast.Module
    classes: dict[str, Class]
    imports: dict[str, str]
    """Name to the file that it comes from."""


def plain(annotation: ast.expr | None) -> str:
    """The class that an annotation names, without `| None`, quotes and module; "" for everything else."""
    match annotation:
        case ast.Constant(value=str(text)):
            return plain(ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return plain(left)
        case ast.Subscript(value=ast.Name(id="Iterator"), slice=inner):  # of a context manager
            return plain(inner)
    return ""


def assigned(nodes: list[ast.AST]) -> Iterator[ast.Attribute]:
    """Every `x.y` that is assigned or deleted."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def behaves(method: Function) -> bool:
    decorators = {ast.unparse(one).split(".")[-1] for one in method.decorator_list}
    return not method.name.startswith("__") and not decorators & {"property", "classmethod", "staticmethod"}


def bound(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a function with these nodes assigns: target and value, tuples taken apart."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                yield from zip(targets, values, strict=False)
            case ast.Assign(targets=[ast.Tuple(elts=[first, *_])], value=value):
                yield first, value  # the first of several results: a type of this form is looked up as the first's
            case ast.Assign(targets=targets, value=value):
                yield from ((target, value) for target in targets)
            case ast.With(items=items):
                yield from ((item.optional_vars, item.context_expr) for item in items if item.optional_vars)


def parameters(function: Function, nodes: list[ast.AST]) -> dict[str, str]:
    arguments = function.args
    known = {one.arg: plain(one.annotation) for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known[node.target.id] = plain(node.annotation)
    return known


def class_of(file: str, node: ast.ClassDef) -> Class:
    methods = [one for one in node.body if isinstance(one, Function)]
    frozen = any("frozen=True" in ast.unparse(one) for one in node.decorator_list)
    found = Class(file, node.name, [plain(base) for base in node.bases], frozen or not any(map(behaves, methods)))
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if "ClassVar" not in ast.unparse(kind):
                found.fields[name] = plain(kind)
    for method in methods:
        found.returns[method.name] = plain(method.returns)
        if "property" in {ast.unparse(one) for one in method.decorator_list}:
            continue
        nodes = walk(method)
        known = parameters(method, nodes)
        for inner in nodes:
            match inner:
                case ast.AnnAssign(target=ast.Attribute(attr=name) as target, annotation=kind) if is_own(target):
                    found.fields[name] = plain(kind)
        for at, value in bound(nodes):
            if isinstance(at, ast.Attribute) and is_own(at):
                match value:
                    case ast.Name(id=name):
                        found.fields.setdefault(at.attr, known.get(name, ""))
                    case ast.Call(func=ast.Name(id=name)):
                        found.fields.setdefault(at.attr, name)
        for own in filter(is_own, assigned(nodes)):
            found.fields.setdefault(own.attr, "")
    return found


def modules(parsed: dict[str, ast.Module]) -> dict[str, Module]:
    found = {}
    for file, tree in parsed.items():
        nodes = walk(tree)
        classes = {node.name: class_of(file, node) for node in nodes if isinstance(node, ast.ClassDef)}
        imports: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                source = node.module.removeprefix("snapshotd.").replace(".", "/") + ".py"
                imports |= {alias.asname or alias.name: source for alias in node.names}
        found[file] = Module(file, tree, classes, imports)
    for _ in range(4):  # a record's subclass is one, too
        for module in found.values():
            for one in module.classes.values():
                one.record = one.record or any(is_record(found, module, base) for base in one.bases)
    return found


def is_record(of: dict[str, Module], module: Module, base: str) -> bool:
    above = look_up(of, module, base)
    return base in RECORDS or (above is not None and any(is_record(of, of[above.file], name) for name in above.bases))


def look_up(of: dict[str, Module], module: Module, name: str) -> Class | None:
    """The class that a name means in a module; None if it is none of ours."""
    found = module.classes.get(name)
    source = of.get(module.imports.get(name, ""))
    return found if found is not None or source is None else look_up(of, source, name)


def class_at(of: dict[str, Module], module: Module, node: ast.expr, known: dict[str, str | ast.expr]) -> Class | None:
    """The class of an expression, as far as annotations tell."""
    match node:
        case ast.Name(id=name):
            local = known.get(name, "")
            if isinstance(local, str):
                return look_up(of, module, local)
            return class_at(of, module, local, {key: value for key, value in known.items() if key != name})
        case ast.Attribute(value=value, attr=name):
            owner = class_at(of, module, value, known)
            if owner is None:
                return None
            return look_up(of, of[owner.file], owner.fields.get(name) or owner.returns.get(name, ""))
        case ast.Call(func=ast.Name(id=name)):
            return look_up(of, module, name)
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            owner = class_at(of, module, value, known)
            return None if owner is None else look_up(of, of[owner.file], owner.returns.get(name, ""))
    return None


def functions(tree: ast.AST, around: str = "") -> Iterator[tuple[Function, str]]:
    """Every function with the class that it stands in; a function's own functions are a part of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node, around
        else:
            yield from functions(node, node.name if isinstance(node, ast.ClassDef) else around)


def large(of: dict[str, Module]) -> dict[str, int]:
    behaving = [one for module in of.values() for one in module.classes.values() if not one.record]
    return {f"{one.file}:{one.name}": len(one.fields) for one in behaving if len(one.fields) > MOST_FIELDS}


def assigned_from_outside(of: dict[str, Module]) -> set[str]:
    """`file: Class.field` of every assignment to a field of a class with behaviour of another module. Where annotations
    name no class, the field's name decides, if only such classes have it."""
    everything = [one for module in of.values() for one in module.classes.values()]
    found = set()
    for module in of.values():
        for function, around in functions(module.tree):
            nodes = walk(function)
            known: dict[str, str | ast.expr] = {
                target.id: value for target, value in bound(nodes) if isinstance(target, ast.Name)
            }
            known |= {name: kind for name, kind in parameters(function, nodes).items() if kind}
            known |= {"self": around, "cls": around}
            for target in assigned(nodes):
                if is_own(target):
                    continue
                one = class_at(of, module, target.value, known)
                owners = [one] if one is not None else [some for some in everything if target.attr in some.fields]
                if owners and not any(owner.record or owner.file == module.file for owner in owners):
                    found.add(f"{module.file}: {owners[0].name}.{target.attr}")
    return found


@cache
def product() -> dict[str, Module]:
    with no_collection():
        return modules(trees())


def test_no_class_is_large() -> None:
    assert large(product()) == LARGE


def test_the_fields_of_a_class_are_assigned_in_its_module_alone() -> None:
    assert assigned_from_outside(product()) == ASSIGNED


MADE = """
class Made:
    def __init__(self) -> None:
        self.at, self.by = 1, None
    def move(self) -> None:
        self.at += 1
@dataclass
class Note:
    text: str
"""
USER = """
from snapshotd.a import Made, Note
class User:
    def __init__(self, made: Made) -> None:
        self._made = made
    def make(self) -> Made: ...
    def use(self, made: "Made | None", note: Note, other) -> None:
        """


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("made.at = 2", {"b.py: Made.at"}),
        ("made.at += 2", {"b.py: Made.at"}),
        ("del made.at", {"b.py: Made.at"}),
        ("made.at, x = 1, 2", {"b.py: Made.at"}),
        ("self._made.by = 2", {"b.py: Made.by"}),
        ("x = self.make(); x.by = 2", {"b.py: Made.by"}),
        ("x = Made(); x.by = 2", {"b.py: Made.by"}),
        ("other.by = 2", {"b.py: Made.by"}),
        ("made.move()", set()),
        ("self.at = 2", set()),
        ("note.text = ''", set()),
        ("other.name = 2", set()),
    ],
)
def test_an_assignment_from_outside_is_seen(line: str, found: set[str]) -> None:
    assert assigned_from_outside(modules({"a.py": ast.parse(MADE), "b.py": ast.parse(USER + line)})) == found
    assert assigned_from_outside(modules({"a.py": ast.parse(MADE + USER + line)})) == set()


@pytest.mark.parametrize(
    ("bases", "decorator", "counted"), [("", "", True), ("Enum", "", False), ("", "@dataclass(frozen=True)\n", False)]
)
def test_fields_are_counted(bases: str, decorator: str, counted: bool) -> None:
    annotated = "".join(f"    a{number}: int\n" for number in range(8))
    methods = "    def move(self):\n" + "".join(f"        self.b{number} = 1\n" for number in range(8))
    found = modules({"a.py": ast.parse(f"{decorator}class A({bases}):\n{annotated}{methods}")})
    assert large(found) == ({"a.py:A": 16} if counted else {})


MOST_LINES = 300
MOST_LINES_OF_A_MODULE = 500


def test_no_class_and_no_module_is_too_long() -> None:
    found = {file: len(text.splitlines()) for file, text in texts().items()}
    assert {file: count for file, count in found.items() if count > MOST_LINES_OF_A_MODULE} == {}
    classes = {
        f"{file}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file, tree in trees().items()
        for node in walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert len(classes) > 500
    assert {name: count for name, count in classes.items() if count > MOST_LINES} == {}
