"""Filters of rows (`input.where`): a small part of Python's expressions, as an expression of Arrow.

    exact_match >= 1 and keep.lang not in ['de', 'fr'] and (finish == 'stop' or logprob is None)

Columns, fields of structs (`keep.lang`, `keep['any name']`), texts, numbers, true and false; == != < <= > >=, `in` lists,
`is None`; and, or, not. Nothing is ever run. As in SQL, a comparison with a null is never true, and its row is
dropped.
"""

from __future__ import annotations

import ast
from functools import reduce
from operator import and_, eq, ge, gt, le, lt, ne, or_
from typing import Any, Final

import pyarrow.compute as pc

MOST_CHARS: Final = 4096
_COMPARISONS: Final = {ast.Eq: eq, ast.NotEq: ne, ast.Lt: lt, ast.LtE: le, ast.Gt: gt, ast.GtE: ge}
_ALLOWED: Final = (
    "columns, texts in quotes, numbers, True, False, == != < <= > >=, in [...], is None, and, or, not, brackets"
)


def parse_where(text: str) -> pc.Expression:
    """The filter as an expression over a table's columns; ValueError, with what is allowed, if it is none."""
    if len(text) > MOST_CHARS:
        raise ValueError(f"{len(text):,} characters; allowed: up to {MOST_CHARS:,}")
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{text!r}: {error.msg}; allowed: {_ALLOWED}") from None
    except (RecursionError, MemoryError):
        raise ValueError("too many brackets") from None


def _expression(node: ast.expr) -> Any:
    match node:
        case ast.BoolOp():
            return reduce(and_ if isinstance(node.op, ast.And) else or_, map(_expression, node.values))
        case ast.UnaryOp(op=ast.Not()):
            return ~_expression(node.operand)
        case ast.Compare():
            values = [node.left, *node.comparators]
            pairs = zip(node.ops, values[:-1], values[1:], strict=True)
            return reduce(and_, (_comparison(*pair) for pair in pairs))
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return pc.field(*_path(node))
        case _:
            return pc.scalar(_constant(node))


def _comparison(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Any:
    is_null = isinstance(right, ast.Constant) and right.value is None
    if is_null and isinstance(op, ast.Is | ast.Eq):
        return _expression(left).is_null()
    if is_null and isinstance(op, ast.IsNot | ast.NotEq):
        return _expression(left).is_valid()
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(right, ast.List | ast.Tuple):
            raise _refusal(right)
        among = _expression(left).isin([_constant(item) for item in right.elts])
        return among if isinstance(op, ast.In) else ~among
    if type(op) not in _COMPARISONS:
        raise _refusal(right)
    return _COMPARISONS[type(op)](_expression(left), _expression(right))


def _path(node: ast.expr) -> tuple[str, ...]:
    """The names of a column and the fields inside it."""
    match node:
        case ast.Name():
            return (node.id,)
        case ast.Attribute():
            return (*_path(node.value), node.attr)
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return (*_path(node.value), name)
        case _:
            raise _refusal(node)


def _constant(node: ast.expr) -> str | int | float | bool:
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise _refusal(node)


def _refusal(node: ast.expr) -> ValueError:
    return ValueError(f"{ast.unparse(node)!r} is not allowed here; allowed: {_ALLOWED}")
