"""What names mean at one place of a walk through a module: which definition a call reaches, what type an object has."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.support.code_index import CodeIndex, Function, Module, Type
from tests.support.wait_rules import BY_METHOD, EVERYBODYS_NAMES, LOCK_NAMES, LOCKS, is_none


class Scope:
    """`names` and `optional` (names that may hold None) change with the function that the walk is in."""

    def __init__(self, index: CodeIndex, module: Module) -> None:
        self._index, self._module = index, module
        self.names: Mapping[str, Type] = {}
        self.optional: set[str] = set()

    def dotted(self, node: ast.expr) -> str | None:
        return self._index.dotted(node, self._module)

    def type_of(self, node: ast.expr) -> Type | None:
        return self._index.type_of(node, self.names, self._module)

    def own_function(self, function: ast.expr) -> Function | None:
        """The definition that a call reaches, where that is certain."""
        name = self.dotted(function)
        if name in self._index.functions:
            return self._index.functions[name]
        if isinstance(function, ast.Name):
            return self.local_function(function.id)
        if not isinstance(function, ast.Attribute):
            return None
        owner = self.type_of(function.value)
        if owner is None and name is not None and self._index.is_own_class(name.rpartition(".")[0]):
            owner = Type(name.rpartition(".")[0])
        found = None if owner is None else self._index.method(owner.name, function.attr)
        return None if found is None else found[1]

    def local_function(self, name: str) -> Function | None:
        """A function inside a function."""
        if name in self._module.names or name in self.names:
            return None
        nodes = ast.walk(self._module.tree)
        return next((node for node in nodes if isinstance(node, Function) and node.name == name), None)

    def is_own(self, function: ast.expr) -> bool:
        if self.own_function(function) is not None:
            return True
        if not isinstance(function, ast.Attribute):
            return False
        owner = self.type_of(function.value)
        return owner is None and self.is_ours_by_name(function.attr)

    def is_ours_by_name(self, method: str) -> bool:
        """What a method of an unknown object is taken for."""
        return method in self._index.async_names and method not in BY_METHOD and method not in EVERYBODYS_NAMES

    def is_own_class(self, function: ast.expr) -> bool:
        return (self.dotted(function) or "") in self._index.classes

    def lock_of(self, node: ast.expr) -> str | None:
        """The kind of lock that an expression is, or None."""
        found = self.type_of(node)
        if found is not None:
            kind = found.name.rpartition(".")[2]
            return kind if kind in LOCKS else None
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            return "Lock" if LOCK_NAMES.search(name.lower()) else None
        return None

    def may_be_none(self, node: ast.expr) -> bool:
        """A timeout that does not end: None, the -1 that `acquire` takes for it, or a name that may hold None."""
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value)
            return owner is not None and self._index.is_optional(owner.name, node.attr)
        return (
            is_none(node)
            or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub))
            or (isinstance(node, ast.Name) and node.id in self.optional)
        )
