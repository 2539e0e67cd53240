"""Layers that their parent's own code gives the same input: query, key and value of an attention, gate and up of a feed-forward block.

Read from the source of the parent's forward (and of the methods that it calls), not from names of models or layers. It is a hint: layers that are
wrongly taken for siblings share the scale of the larger of their inputs, and all else stays right.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn


def find_siblings(model: nn.Module, widths: dict[int, int]) -> Iterator[list[nn.Module]]:
    """Groups of two and more layers that are called with the same variable, unchanged in between. Each layer comes in one group at most.

    widths: id -> input features of the layers that count; only layers of the same width are siblings.
    """
    taken: set[int] = set()
    calls_of: dict[type, list[list[str]]] = {}
    for parent in model.modules():
        if not any(id(m) in widths for m in parent.modules() if m is not parent):
            continue
        if type(parent) not in calls_of:
            calls_of[type(parent)] = _read(type(parent))
        for paths in calls_of[type(parent)]:
            groups: dict[int, list[nn.Module]] = {}
            for path in paths:
                layer = _resolve(parent, path)
                if layer is not None and id(layer) in widths and id(layer) not in taken:
                    group = groups.setdefault(widths[id(layer)], [])
                    if not any(layer is other for other in group):
                        group.append(layer)
            for group in groups.values():
                if len(group) > 1:
                    taken.update(map(id, group))
                    yield group


def _resolve(parent: nn.Module, path: str) -> nn.Module | None:
    found: Any = parent
    for name in path.split("."):
        found = found._modules.get(name) if isinstance(found, nn.Module) else None
    return found


def _read(kind: type) -> list[list[str]]:
    """For each variable, as often as it gets a new value: the submodules ("q_proj", "block.up") that are called with it alone."""
    found, waiting, seen = [], ["forward"], {"forward"}
    while waiting:
        calls = _Calls()
        function = inspect.unwrap(getattr(kind, waiting.pop()))
        try:
            calls.visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
        except (OSError, TypeError, SyntaxError, RecursionError):  # no source, or none that can be read
            continue
        found += [paths for paths in calls.by_argument.values() if len(paths) > 1]
        for name in calls.methods - seen:
            method = getattr(kind, name, None)
            if inspect.isfunction(method) and not hasattr(nn.Module, name):
                waiting.append(name)
                seen.add(name)
    return found


class _Calls(ast.NodeVisitor):
    """Calls `self.path(variable)`, in the order of execution as far as it matters."""

    def __init__(self) -> None:
        self.by_argument: dict[tuple[str, int], list[str]] = {}  # (variable, how often it was assigned before) -> paths
        self.methods: set[str] = set()
        self._versions: dict[str, int] = {}

    def visit_Call(self, node: ast.Call) -> None:
        """Arguments are evaluated before the call."""
        self.generic_visit(node)
        path = ast.unparse(node.func).split(".") if isinstance(node.func, ast.Attribute) else []
        if len(path) < 2 or path[0] != "self" or not all(name.isidentifier() for name in path):
            return
        if len(path) == 2:
            self.methods.add(path[1])
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        if len(values) == 1 and isinstance(values[0], ast.Name):
            name = values[0].id
            self.by_argument.setdefault((name, self._versions.get(name, 0)), []).append(".".join(path[1:]))

    def visit_Name(self, node: ast.Name) -> None:
        """An assignment makes another variable of it."""
        if not isinstance(node.ctx, ast.Load):
            self._versions[node.id] = self._versions.get(node.id, 0) + 1

    def _value_first(self, node: Any) -> None:
        for field in ("value", "iter", "test"):
            if getattr(node, field, None) is not None:
                self.visit(getattr(node, field))
        if isinstance(node, (ast.For, ast.While)):  # what the body assigns may come round to its beginning
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name):
                    self.visit_Name(inner)
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            if target is not None:
                self.visit(target)
        for statement in (*getattr(node, "body", ()), *getattr(node, "orelse", ())):
            self.visit(statement)

    visit_Assign = visit_AnnAssign = visit_AugAssign = visit_NamedExpr = visit_For = visit_While = _value_first
