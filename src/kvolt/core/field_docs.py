"""Help texts of struct fields: the string below each field in the source, read when help is shown."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise


def field_texts(struct: type) -> dict[str, str]:
    """Text of each field that has one, also of inherited fields; empty if the source is not available."""
    kinds = [kind for kind in reversed(struct.__mro__) if kind.__module__ not in ("builtins", "msgspec")]
    return {
        name: text for kind in kinds for name, text in _class_docs(kind.__module__).get(kind.__name__, ())
    }


@cache
def _class_docs(module: str) -> dict[str, list[tuple[str, str]]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return {node.name: list(_texts(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                yield name, text
