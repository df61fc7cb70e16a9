"""Checks grammars that a client sends as Lark, the language of the grammar library, or as GBNF.

The library bounds its work with a fuel limit, with two exceptions: the time of an intersection of patterns grows
exponentially with their number, and its compiler recurses once per rule of a chain. Both are bounded here. Directives
that embed other languages are rejected, since schemas are a separate grammar kind.
"""

from __future__ import annotations

import re

from kvolt.core.errors import InvalidRequest
from kvolt.engines.native.grammar.gbnf import is_gbnf, lark_of_gbnf

MAX_RULES = 1000
_MAX_OPERATORS = 8

_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|\#[^\n]*', re.DOTALL)
_OPERATOR = re.compile(r"&|~(?!\s*\d)")
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_]\w*\s*(?:\[[^\]\n]*\]|\.\d+|\{[^}\n]*\})?\s*:", re.MULTILINE)
_DIRECTIVE = re.compile(r"%(?:json|regex|lark)\b|@")


def lark_of_ebnf(text: str) -> str:
    """A grammar in either notation as Lark. InvalidRequest if it is invalid or exceeds a limit."""
    lark = lark_of_gbnf(text) if is_gbnf(text) else text
    bare = _QUOTED.sub(" ", lark)
    num_rules = len(_RULE.findall(bare))
    if num_rules > MAX_RULES:
        raise InvalidRequest(f"the grammar has {num_rules} rules; the limit is {MAX_RULES}", param="grammar")
    if len(_OPERATOR.findall(bare)) > _MAX_OPERATORS:
        raise InvalidRequest(f"the grammar has more than {_MAX_OPERATORS} of & and ~", param="grammar")
    directive = _DIRECTIVE.search(bare)
    if directive is not None:
        raise InvalidRequest(f"a grammar may not use {directive.group()}", param="grammar")
    return lark
