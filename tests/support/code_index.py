"""What a name or an expression means in the package's source, as far as its annotations say: for tests that inspect code.

Nothing is imported. A type is its dotted name with its arguments: `set[asyncio.Task[int]]`. What cannot be told is None.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MADE_BY = {
    "asyncio.create_task": "asyncio.Task",
    "asyncio.ensure_future": "asyncio.Task",
    "asyncio.wrap_future": "asyncio.Future",
    "asyncio.run_coroutine_threadsafe": "concurrent.futures.Future",
    "asyncio.get_running_loop": "asyncio.AbstractEventLoop",
}
_MADE_BY_METHOD = {
    "create_task": "asyncio.Task",
    "create_future": "asyncio.Future",
    "submit": "concurrent.futures.Future",
}


@dataclass(frozen=True, slots=True)
class Type:
    """`dict[str, asyncio.Task[int]]` -> name "dict", arguments (Type("str"), Type("asyncio.Task", (Type("int"),)))."""

    name: str
    arguments: tuple[Type | None, ...] = ()

    @property
    def element(self) -> Type | None:
        """What iterating over a container of this type gives."""
        return self.arguments[0] if self.arguments else None


@dataclass(slots=True)
class Class:
    name: str
    module: Module
    node: ast.ClassDef
    bases: list[str]
    methods: dict[str, Function]
    attributes: dict[str, Type] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    """Attributes that may be None, as their annotations say."""


@dataclass(slots=True)
class Module:
    """One file. `names`: what its imports and definitions call what ({"dist": "torch.distributed"})."""

    name: str
    tree: ast.Module
    comments: dict[int, str]
    names: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Type] = field(default_factory=dict)


class CodeIndex:
    """Modules that know each other.

    Args:
        sources: dotted module name -> its text.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.modules = {name: _read(name, text) for name, text in sources.items()}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, Function] = {}
        self.async_names: set[str] = set()
        self._module_of: dict[str, Module] = {}
        for module in self.modules.values():
            self._collect(module)
        for _ in range(2):  # an attribute may be made from one of another class
            for found in self.classes.values():
                self._collect_attributes(found)

    def dotted(self, node: ast.expr, module: Module) -> str | None:
        """`dist.barrier` -> "torch.distributed.barrier"; None for what is not a chain of names."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return self._origin(".".join([module.names.get(node.id, node.id), *reversed(parts)]))

    def _origin(self, dotted: str) -> str:
        """Where an imported name is defined: `grpo_async.envs.Environments` -> `grpo_async.envs.load.Environments`."""
        package, _, rest = dotted.rpartition(".")
        if dotted in self.modules or not package:
            return dotted
        if package in self.modules:
            target = self.modules[package].names.get(rest)
            return dotted if target is None or target == dotted else self._origin(target)
        origin = self._origin(package)
        return dotted if origin == package else f"{origin}.{rest}"

    def method(self, owner: str, name: str) -> tuple[Class, Function] | None:
        """The method of an own class or of its own bases."""
        found = self.classes.get(owner)
        if found is None:
            return None
        if name in found.methods:
            return found, found.methods[name]
        return next((method for base in found.bases if (method := self.method(base, name)) is not None), None)

    def is_optional(self, owner: str, attribute: str) -> bool:
        """Whether an attribute of an own class may be None."""
        found = self.classes.get(owner)
        if found is None:
            return False
        return attribute in found.optional or any(self.is_optional(base, attribute) for base in found.bases)

    def is_own_class(self, name: str) -> bool:
        return name in self.classes

    def annotation(self, node: ast.expr | None, module: Module) -> Type | None:
        """The type that an annotation names; `A | None` -> A."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            sides = (self.annotation(side, module) for side in (node.left, node.right))
            return next((side for side in sides if side is not None and side.name != "None"), None)
        if isinstance(node, ast.Subscript):
            outer = self.annotation(node.value, module)
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            arguments = tuple(self.annotation(each, module) for each in inner if not isinstance(each, ast.List))
            if outer is not None and outer.name == "typing.Optional":
                return arguments[0]
            return None if outer is None else Type(outer.name, arguments)
        if isinstance(node, ast.Name | ast.Attribute):
            name = self.dotted(node, module)
            return None if name is None else Type(name)
        return None

    def scope(
        self, function: Function | ast.Lambda, owner: str | None, outer: Mapping[str, Type], module: Module
    ) -> dict[str, Type]:
        """The types of the names that a function sees."""
        names = dict(outer)
        arguments = function.args
        for number, argument in enumerate([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]):
            names.pop(argument.arg, None)
            if (found := self.annotation(argument.annotation, module)) is not None:
                names[argument.arg] = found
            elif number == 0 and owner is not None and argument.arg in ("self", "cls"):
                names[argument.arg] = Type(owner)
        if isinstance(function, ast.Lambda):
            return names
        for _ in range(2):  # a name may be made from one that is assigned further down
            for node in own_nodes(function):
                for name, found in self._bindings(node, names, module):
                    names.setdefault(name, found)
        return names

    def type_of(self, node: ast.expr, names: Mapping[str, Type], module: Module) -> Type | None:
        """The type of an expression, or None."""
        match node:
            case ast.Name():
                return names.get(node.id) or module.variables.get(node.id)
            case ast.Attribute():
                owner = self.type_of(node.value, names, module)
                return None if owner is None else self._attribute(owner, node.attr)
            case ast.Await():
                return self.type_of(node.value, names, module)
            case ast.Call():
                return self._result(node, names, module)
            case ast.IfExp():
                return self.type_of(node.body, names, module) or self.type_of(node.orelse, names, module)
            case ast.BoolOp():
                return next((found for each in node.values if (found := self.type_of(each, names, module))), None)
            case ast.NamedExpr():
                return self.type_of(node.value, names, module)
            case ast.List() | ast.Set() | ast.Tuple() if node.elts:
                return Type("list", (self.type_of(node.elts[0], names, module),))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                inner = dict(names)
                for part in node.generators:
                    inner.update(self._elements(part.target, part.iter, inner, module))
                return Type("list", (self.type_of(node.elt, inner, module),))
            case ast.Subscript():
                container = self.type_of(node.value, names, module)
                return container.arguments[-1] if container is not None and container.arguments else None
        return None

    def _collect(self, module: Module) -> None:
        local: list[ast.ClassDef | Function] = []
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module.names[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                module.names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.AsyncFunctionDef):
                self.async_names.add(node.name)
        for statement in module.tree.body:
            if isinstance(statement, ast.ClassDef | Function):
                module.names[statement.name] = f"{module.name}.{statement.name}"
                local.append(statement)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node not in local:  # inside a function
                module.names.setdefault(node.name, f"{module.name}.{node.name}")
                local.append(node)
        for each in local:
            dotted = f"{module.name}.{each.name}"
            self._module_of[dotted] = module
            if isinstance(each, ast.ClassDef):
                bases = [name for base in each.bases if (name := self.dotted(_unsubscripted(base), module)) is not None]
                methods = {part.name: part for part in each.body if isinstance(part, Function)}
                self.classes[dotted] = Class(dotted, module, each, bases, methods)
            else:
                self.functions[dotted] = each
        for statement in module.tree.body:
            for name, found in self._bindings(statement, {}, module):
                module.variables.setdefault(name, found)

    def _collect_attributes(self, found: Class) -> None:
        for statement in found.node.body:
            if isinstance(statement, ast.AnnAssign) and may_be_none(statement.annotation):
                found.optional.add(ast.unparse(statement.target))
            for name, kind in self._bindings(statement, {}, found.module):
                found.attributes.setdefault(name, kind)
        for method in found.methods.values():
            names = self.scope(method, found.name, {}, found.module)
            for node in own_nodes(method):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                value = getattr(node, "value", None)
                for target in targets:
                    if not (isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"):
                        continue
                    if self._is_optional(node, method):
                        found.optional.add(target.attr)
                    kind = self.annotation(getattr(node, "annotation", None), found.module)
                    if kind is None and isinstance(node, ast.Assign) and value is not None:
                        kind = self.type_of(value, names, found.module)
                    if kind is not None:
                        found.attributes.setdefault(target.attr, kind)

    @staticmethod
    def _is_optional(node: ast.AST, method: Function) -> bool:
        """`self.x: int | None = ...`, or `self.x = y` of a parameter that may be None."""
        if isinstance(node, ast.AnnAssign):
            return may_be_none(node.annotation)
        value = getattr(node, "value", None)
        return isinstance(value, ast.Name) and value.id in optional_names(method)

    def _attribute(self, owner: Type, name: str) -> Type | None:
        found = self.classes.get(owner.name)
        if found is None:
            return None
        if name in found.attributes:
            return found.attributes[name]
        method = self.method(owner.name, name)
        if method is not None and any(getattr(mark, "id", "") == "property" for mark in method[1].decorator_list):
            return self.annotation(method[1].returns, method[0].module)
        return next((kind for base in found.bases if (kind := self._attribute(Type(base), name)) is not None), None)

    def _result(self, call: ast.Call, names: Mapping[str, Type], module: Module) -> Type | None:
        dotted = self.dotted(call.func, module) or ""
        if dotted in _MADE_BY:
            return Type(_MADE_BY[dotted])
        if dotted in self.functions:
            return self.annotation(self.functions[dotted].returns, self._module_of[dotted])
        last = dotted.rpartition(".")[2]
        if dotted in ("list", "set", "tuple", "dict", "sorted", "reversed", "frozenset") and call.args:
            return self.type_of(call.args[0], names, module)
        if isinstance(call.func, ast.Attribute):
            owner = self.type_of(call.func.value, names, module)
            if owner is not None and (method := self.method(owner.name, call.func.attr)) is not None:
                return self.annotation(method[1].returns, method[0].module)
            if call.func.attr == "values" and owner is not None and len(owner.arguments) == 2:
                return Type("list", (owner.arguments[1],))
            if call.func.attr in _MADE_BY_METHOD:
                return Type(_MADE_BY_METHOD[call.func.attr])
        if dotted in self.classes or last[:1].isupper():
            return Type(dotted)
        if call.func.__class__ is ast.Attribute and dotted.rpartition(".")[0].rpartition(".")[2][:1].isupper():
            return Type(dotted.rpartition(".")[0]) if dotted.rpartition(".")[0] in self.classes else None
        return None

    def _bindings(self, node: ast.AST, names: Mapping[str, Type], module: Module) -> Iterator[tuple[str, Type]]:
        """Names that a statement gives a type to."""
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = self.annotation(node.annotation, module)
            if kind is not None:
                yield node.target.id, kind
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from self._assigned(target, node.value, names, module)
        elif isinstance(node, ast.NamedExpr):
            yield from self._assigned(node.target, node.value, names, module)
        elif isinstance(node, ast.For | ast.AsyncFor):
            yield from self._elements(node.target, node.iter, names, module).items()
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            kind = Type("file") if _opens_a_file(node) else self.type_of(node.context_expr, names, module)
            if kind is not None:
                yield node.optional_vars.id, kind

    def _assigned(
        self, target: ast.expr, value: ast.expr, names: Mapping[str, Type], module: Module
    ) -> Iterator[tuple[str, Type]]:
        if isinstance(target, ast.Name) and (kind := self.type_of(value, names, module)) is not None:
            yield target.id, kind
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, given in zip(target.elts, value.elts, strict=False):
                yield from self._assigned(part, given, names, module)
        elif isinstance(target, ast.Tuple) and (waited := self._waited_for(value, names, module)) is not None:
            yield from ((part.id, waited) for part in target.elts if isinstance(part, ast.Name))

    def _waited_for(self, value: ast.expr, names: Mapping[str, Type], module: Module) -> Type | None:
        """`done, pending = await asyncio.wait(tasks)`: both are like `tasks`."""
        call = value.value if isinstance(value, ast.Await) else None
        if isinstance(call, ast.Call) and call.args and self.dotted(call.func, module) == "asyncio.wait":
            return self.type_of(call.args[0], names, module)
        return None

    def _elements(
        self, target: ast.expr, iterated: ast.expr, names: Mapping[str, Type], module: Module
    ) -> dict[str, Type]:
        if isinstance(target, ast.Tuple) and isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
            found: dict[str, Type] = {}
            parts = {"zip": target.elts, "enumerate": target.elts[1:]}.get(iterated.func.id, [])
            for part, given in zip(parts, iterated.args, strict=False):
                found |= self._elements(part, given, names, module)
            return found
        container = self.type_of(iterated, names, module)
        if isinstance(target, ast.Name) and container is not None and container.element is not None:
            return {target.id: container.element}
        return {}


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Every node of a function, those of functions inside it left out."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from own_nodes(child)


def may_be_none(annotation: ast.expr | None) -> bool:
    """`float | None`, `Optional[float]`."""
    return annotation is not None and re.search(r"\bNone\b|\bOptional\b", ast.unparse(annotation)) is not None


def optional_names(function: Function) -> set[str]:
    """Parameters and annotated variables of a function that may be None."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variables = (node for node in own_nodes(function) if isinstance(node, ast.AnnAssign))
    return {each.arg for each in every if may_be_none(each.annotation)} | {
        each.target.id for each in variables if isinstance(each.target, ast.Name) and may_be_none(each.annotation)
    }


def python_files(roots: Iterable[Path]) -> Iterator[Path]:
    """Files below `roots` that hold Python: by their ending or by their first line."""
    for root in roots:
        for file in sorted(root.rglob("*")):
            if not file.is_file() or "__pycache__" in file.parts:
                continue
            if file.suffix == ".py" or (
                file.suffix == "" and file.read_bytes()[:80].startswith(b"#!/usr/bin/env python")
            ):
                yield file


def _opens_a_file(item: ast.withitem) -> bool:
    """`with path.open() as file`, `with open(path) as file`; a descriptor may be that of a pipe."""
    call = item.context_expr
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Attribute):
        return call.func.attr == "open" and getattr(call.func.value, "id", "") != "os"
    is_descriptor = bool(call.args) and re.search("descriptor|fileno|fd|pipe", ast.unparse(call.args[0])) is not None
    return getattr(call.func, "id", "") == "open" and not is_descriptor


def _read(name: str, text: str) -> Module:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    return Module(name=name, tree=ast.parse(text), comments=comments)


def _unsubscripted(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node
