"""Grammars of clients as Lark, the language of the grammar library: checks Lark, converts GBNF.

The library bounds its work with a fuel limit, with two exceptions: the time of an intersection of patterns grows
exponentially with their number, and its compiler recurses once per rule of a chain. Both are bounded here. Directives
that embed other languages are rejected, since schemas are a separate grammar kind.

GBNF is the EBNF of llama.cpp and xgrammar. Lark has a lexer, which takes the longest match; GBNF has none. So regular
parts are written as single patterns: a grammar without recursion becomes one pattern with the same meaning; in a
recursive one, each run of regular parts becomes one lexeme. A rule that refers to itself only at its end
(`ws ::= ([ \\n] ws)?`) is a loop, which is regular. The library's own converter takes 40 s for 150 kB and does not
support alternatives on a new line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple, NoReturn

from kvolt.core.errors import InvalidRequest
from kvolt.engines.native.grammar.regex import ANY_CHARACTER, quote

MAX_RULES = 1000
_MAX_OPERATORS = 8

_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|\#[^\n]*', re.DOTALL)
_OPERATOR = re.compile(r"&|~(?!\s*\d)")
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_]\w*\s*(?:\[[^\]\n]*\]|\.\d+|\{[^}\n]*\})?\s*:", re.MULTILINE)
_GBNF = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
_DIRECTIVE = re.compile(r"%(?:json|regex|lark)\b|@")

_MAX_INLINED_CHARS = 8 * 1024
"""Rules with longer patterns are not inlined."""
_MAX_PATTERN_CHARS = 256 * 1024
"""Most characters of all inlined patterns together."""

_TOKEN = re.compile(
    r"""(?P<skip>(?:\s|\#[^\n]*)+) | (?P<define>::=) | (?P<name>[A-Za-z_][\w-]*)
    | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*') | (?P<class>\[(?:\\.|[^\]\\])*\])
    | (?P<bounds>\{\s*\d*\s*(?:,\s*\d*\s*)?\}) | (?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_BOUNDS = {"*": "{0,}", "+": "{1,}", "?": "{0,1}"}


def lark_of_ebnf(text: str) -> str:
    """A grammar in either notation as Lark. InvalidRequest if it is invalid or exceeds a limit."""
    lark = lark_of_gbnf(text) if _GBNF.search(text) else text
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


class _Part(NamedTuple):
    """A part of a rule. With `loop` it is the loop's pattern followed by the rule itself, or `pattern`."""

    pattern: str | None
    """None: not regular, or only a loop."""
    lark: str = ""
    loop: str | None = None

    @property
    def is_regular(self) -> bool:
        return self.pattern is not None and self.loop is None

    @property
    def is_opaque(self) -> bool:
        return self.pattern is None and self.loop is None

    @property
    def text(self) -> str:
        if not self.is_regular:
            return self.lark
        return f"/{self.pattern}/" if self.pattern else '""'


def _either(patterns: list[str]) -> str:
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def lark_of_gbnf(text: str, root: str = "root") -> str:
    """Convert a grammar. InvalidRequest with the line number if it is not valid GBNF."""
    bodies = _split_rules(text, _tokens(text))
    if root not in bodies:
        raise InvalidRequest(f"the grammar has no rule {root!r}", param="grammar")
    try:
        return _Writer(text, bodies).write(root)
    except RecursionError:
        raise InvalidRequest("the grammar is nested too deeply", param="grammar") from None


def _fail(text: str, at: int, what: str) -> NoReturn:
    line = text.count("\n", 0, at) + 1
    raise InvalidRequest(f"grammar, line {line}: {what} at {text[at : at + 20]!r}", param="grammar")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            _fail(text, at, "cannot be read")
        kind = match.lastgroup or ""
        if kind != "skip":
            tokens.append(_Token(kind, match.group(), at))
        at = match.end()
    return tokens


def _split_rules(text: str, tokens: list[_Token]) -> dict[str, list[_Token]]:
    """Tokens of each rule, which ends at the next definition; line breaks are ignored."""
    bodies: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.kind == "name" and following is not None and following.kind == "define":
            if token.text in bodies:
                _fail(text, token.at, "a rule is defined twice")
            body = bodies[token.text] = []
        elif body is None:
            _fail(text, token.at, "a rule must start with its name and ::=")
        elif token.kind != "define":
            body.append(token)
        elif body:
            _fail(text, token.at, "::= has no name before it")
    return bodies


class _Writer:
    """Writes rules in dependency order, so that regular rules can be inlined."""

    def __init__(self, text: str, bodies: dict[str, list[_Token]]) -> None:
        self._text = text
        self._bodies = bodies
        self._names = {name: f"r{number}" for number, name in enumerate(bodies)}
        self._patterns: dict[str, str] = {}
        self._num_chars_left = _MAX_PATTERN_CHARS
        self._current = ""
        self._tokens: list[_Token] = []
        self._next = 0

    def write(self, root: str) -> str:
        parts: dict[str, _Part] = {}
        for name in self._in_order():
            part = parts[name] = self._rule(name)
            if part.is_regular and len(part.pattern or "") <= _MAX_INLINED_CHARS:
                self._patterns[name] = part.pattern or ""
        lines = [f"start: {parts[root].text}" if root in self._patterns else f"start: {self._names[root]}"]
        lines += [
            f"{self._names[name]}: {part.text}" for name, part in parts.items() if name not in self._patterns
        ]
        # Beyond the limit for inlined patterns, rules refer to pattern rules by name.
        lines += [
            f"{self._names[name]}: {parts[name].text}" for name in self._patterns if self._num_chars_left < 0
        ]
        return "\n".join(lines) + "\n"

    def _in_order(self) -> list[str]:
        """Rules that reach no cycle, in dependency order; then the others."""
        users: dict[str, list[str]] = defaultdict(list)
        missing: dict[str, int] = {}
        for name, body in self._bodies.items():
            used = {token.text: token for token in body if token.kind == "name" and token.text != name}
            for other, token in used.items():
                if other not in self._bodies:
                    _fail(self._text, token.at, f"no rule {other[:40]!r}")
                users[other].append(name)
            missing[name] = len(used)
        order = [name for name, count in missing.items() if count == 0]
        for name in order:
            for user in users[name]:
                missing[user] -= 1
                if missing[user] == 0:
                    order.append(user)
        placed = set(order)
        return order + [name for name in self._bodies if name not in placed]

    def _rule(self, name: str) -> _Part:
        self._current, self._tokens, self._next = name, self._bodies[name], 0
        part = self._alternatives()
        if self._next < len(self._tokens):
            _fail(self._text, self._tokens[self._next].at, "unexpected")
        if part.loop is not None and part.pattern is not None:
            return _Part(f"(?:{part.loop})*(?:{part.pattern})")
        return part

    def _peek(self) -> str | None:
        """The next mark, or kind of token, of this rule."""
        if self._next == len(self._tokens):
            return None
        token = self._tokens[self._next]
        return token.text if token.kind == "mark" else token.kind

    def _alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._next += 1
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        lark = f"({' | '.join(part.text for part in parts)})"
        if any(part.is_opaque for part in parts):
            return _Part(None, lark)
        ends = [part.pattern for part in parts if part.pattern is not None]
        loops = [part.loop for part in parts if part.loop is not None]
        return _Part(_either(ends) if ends else None, lark, _either(loops) if loops else None)

    def _sequence(self) -> _Part:
        runs: list[_Part] = []
        while self._peek() not in (None, "|", ")"):
            part = self._repeated()
            if runs and runs[-1].is_regular and part.is_regular:
                runs[-1] = _Part(f"{runs[-1].pattern}{part.pattern}")
            else:
                runs.append(part)
        if not runs:
            return _Part("")
        if len(runs) == 1:
            return runs[0]
        lark = f"({' '.join(run.text for run in runs)})"
        before, last = runs[0], runs[-1]
        if len(runs) > 2 or not before.is_regular or last.is_opaque:
            return _Part(None, lark)
        end = None if last.pattern is None else f"{before.pattern}{last.pattern}"
        return _Part(end, lark, f"{before.pattern}{last.loop}")

    def _repeated(self) -> _Part:
        part = self._atom()
        while (mark := self._peek()) in ("*", "+", "?", "bounds"):
            bounds = _BOUNDS.get(mark or "") or self._bounds(self._tokens[self._next])
            self._next += 1
            lark = f"({part.lark}){bounds}"
            if part.is_regular:
                part = _Part(f"(?:{part.pattern}){bounds}")
            elif mark == "?" and part.loop is not None:
                part = _Part(f"(?:{part.pattern or ''})?", lark, part.loop)
            else:
                part = _Part(None, lark)
        return part

    def _bounds(self, token: _Token) -> str:
        least, _, most = token.text[1:-1].replace(" ", "").partition(",")
        if "," not in token.text:
            if not least:
                _fail(self._text, token.at, "a repeat without a number")
            most = least
        return f"{{{least or 0},{most}}}"

    def _atom(self) -> _Part:
        token = self._tokens[self._next]
        self._next += 1
        if token.kind == "text":
            return _Part(quote("".join(map(chr, self._codes(token.text[1:-1])))))
        if token.kind == "class":
            return _Part(self._class(token))
        if token.kind == "name":
            return self._reference(token.text)
        if token.text == ".":
            return _Part(ANY_CHARACTER)
        if token.text != "(":
            _fail(self._text, token.at, "unexpected")
        part = self._alternatives()
        if self._peek() != ")":
            _fail(self._text, token.at, "a bracket is not closed")
        self._next += 1
        return part

    def _reference(self, name: str) -> _Part:
        if name == self._current:
            return _Part(None, self._names[name], "")
        pattern = self._patterns.get(name)
        if pattern is not None and self._num_chars_left >= 0:
            self._num_chars_left -= len(pattern)
            if self._num_chars_left >= 0:
                return _Part(f"(?:{pattern})")
        return _Part(None, self._names[name])

    def _codes(self, text: str) -> list[int]:
        codes: list[int] = []
        for two, four, eight, escaped, plain in _ESCAPE.findall(text):
            number = two or four or eight
            codes.append(int(number, 16) if number else ord(plain or _NAMED.get(escaped, escaped)))
        if any(code > 0x10FFFF for code in codes):
            _fail(self._text, self._text.find(text), "no such character")
        return codes

    def _class(self, token: _Token) -> str:
        inner = token.text[1:-1]
        negated = inner.startswith("^")
        items = _ESCAPE.findall(inner[1:] if negated else inner)
        codes = self._codes(inner[1:] if negated else inner)
        parts: list[str] = []
        at = 0
        while at < len(codes):
            if at + 2 < len(codes) and items[at + 1][4] == "-":
                parts.append(f"{quote(chr(codes[at]))}-{quote(chr(codes[at + 2]))}")
                at += 3
            else:
                parts.append(quote(chr(codes[at])))
                at += 1
        if not parts:
            _fail(self._text, token.at, "an empty class")
        return f"[{'^' if negated else ''}{''.join(parts)}]"
