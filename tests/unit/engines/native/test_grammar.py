from __future__ import annotations

import json
import random
import re
import threading
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.waits import MUST_HAPPEN_S
from tokenizers import Tokenizer

from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Sampling
from kvolt.engines.native.grammar import compiler as grammar_module
from kvolt.engines.native.grammar.compiler import CompiledGrammar, GrammarCompiler
from kvolt.engines.native.grammar.lark import lark_of_gbnf
from kvolt.engines.native.sampling.sampler import Row, sample
from kvolt.engines.sim.model import EOS, SPECIAL, tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tokenizer_json())
VOCABULARY = TOKENIZER.get_vocab_size()
END = 0
"""A second end of sequence."""


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS, END])


def compiled(kind: GrammarKind, text: str) -> CompiledGrammar:
    return compiler().compile(Grammar(kind, text))


def allowed(matcher: Any) -> set[int]:
    row = torch.zeros(compiler().mask_words, dtype=torch.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(kind: GrammarKind, text: str, output: str) -> bool:
    """Whether this output, and an end of sequence after it, follows the grammar."""
    matcher = compiled(kind, text).start()
    ids = TOKENIZER.encode(output, add_special_tokens=False).ids
    return all(matcher.accept(token) for token in ids) and EOS in allowed(matcher)


def walk(kind: GrammarKind, text: str, seed: int, num_free: int = 25, limit: int = 400) -> str:
    """A random output: constrained random logits, which lean to the end after a while."""
    matcher = compiled(kind, text).start()
    generator = torch.Generator().manual_seed(seed)
    closing = [EOS, *(TOKENIZER.token_to_id(mark) for mark in '"}]')]
    mask = torch.empty(compiler().mask_words, dtype=torch.int32)
    output: list[int] = []
    for position in range(limit):
        logits = torch.randn(1, VOCABULARY, generator=generator)
        if position >= num_free:
            logits[0, closing] += torch.tensor([30.0, 20.0, 20.0, 20.0])
        matcher.fill(mask)
        (result,) = sample(logits, [Row(Sampling(), seed, position=position, mask=mask)])
        assert result.token is not None, (result.failure, matcher.error, TOKENIZER.decode(output))
        assert matcher.accept(result.token), matcher.error
        if result.token in (EOS, END):
            return TOKENIZER.decode(output, skip_special_tokens=False)
        assert result.token not in range(len(SPECIAL)), "a special token is no text"
        output.append(result.token)
    raise AssertionError(f"no end in {limit} tokens: {TOKENIZER.decode(output)!r}")


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "maxItems": 3},
            "address": {
                "type": "object",
                "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "tags", "address"],
        "additionalProperties": False,
    },
    "any_of": {
        "type": "object",
        "properties": {
            "value": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}, {"type": "null"}]},
            "kind": {"const": "fixed"},
        },
        "required": ["value", "kind"],
    },
    "ref": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "additional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "all_of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"enum": ["x"]}}, "required": ["b"]},
        ]
    },
    "one_of": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "b")
        ]
    },
    "pattern": {"type": "string", "pattern": "^(foo|ba[rz])+$", "maxLength": 12},
    "annotated": {
        "title": "T",
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "phone", "maxLength": 3},
            "default": {"type": "string", "format": "int32", "default": {"format": "x"}, "maxLength": 3},
        },
        "required": ["format", "default"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", range(3))
def test_random_output_follows_a_schema(name: str, seed: int) -> None:
    output = walk(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMAS[name]), seed)
    jsonschema.validate(json.loads(output), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(4))
def test_random_output_is_a_json_object(seed: int) -> None:
    assert isinstance(json.loads(walk(GrammarKind.JSON_OBJECT, "", seed)), dict)


def test_whitespace_between_json_tokens_is_bounded() -> None:
    schema = '{"type":"object"}'
    for good in ('{"a":1}', '{ "a": 1 }', '{\n    "a": [\n\t1\r\n]\n}'):
        assert accepts(GrammarKind.JSON_SCHEMA, schema, good), good
    for bad in ('{  "a":1}', '{\n\n"a":1}', '{"a":\t1}'):
        assert not accepts(GrammarKind.JSON_SCHEMA, schema, bad), bad


PATTERNS = [
    r"\d{4}-\d{2}-\d{2}",
    r"^(foo|bar)+ [a-z]{2,5}?$",
    r"(?:[A-Z][a-z]{1,9} ){1,4}\w{1,8}@\w{1,5}\.(com|org)",
    r"[^\"\n\W]{1,10}\.\s",
    r"(?i:heLLo) (?P<who>w[o0]rld)",
    r"(?s).{3}\S\D",
    r"\A(a|b(?:c|d)){,3}\Z",
    r"[a[b]&&-~/]{2,5}x/y#\x41é",
    r"(^a|^b)(c$|d$)",
    r"(a{2}){2}|(?#comment)b?",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_output_matches_a_pattern_as_python_reads_it(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python is not sure of all of these either
        matches = re.compile(pattern, re.ASCII).fullmatch
    for seed in range(4):
        output = walk(GrammarKind.REGEX, pattern, seed)
        assert matches(output), output


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?=a)abc", "look-around"),
        (r"(?<!a)b", "look-around"),
        (r"(a)\1", "back reference"),
        (r"\bfoo\b", "word boundary or an anchor"),
        (r"a$b", "an anchor in the middle"),
        (r"(a^)?b", "an anchor in the middle"),
        (r"(?>ab)", "atomic"),
        (r"a++", "possessive"),
        (r"(", "not a regular expression"),
        ("(" * 3000 + ")" * 3000, "not a regular expression"),
        (r"[^\s\S]", "no output can satisfy it"),
    ],
)
def test_patterns_that_cannot_be_followed(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiled(GrammarKind.REGEX, pattern)
    assert caught.value.fields["param"] == "grammar"


def test_choices() -> None:
    choices = ["yes", "no", "no way", 'say "so"', "a/b\n#", "naïve"]
    text = json.dumps(choices)
    for choice in choices:
        assert accepts(GrammarKind.CHOICE, text, choice), choice
    for other in ("", "ye", "now", "yesno"):
        assert not accepts(GrammarKind.CHOICE, text, other), other
    for seed in range(10):
        assert walk(GrammarKind.CHOICE, text, seed) in choices


def test_many_choices() -> None:
    choices = [f"option-{number}" for number in range(4096)]
    assert walk(GrammarKind.CHOICE, json.dumps(choices), 1) in choices
    assert accepts(GrammarKind.CHOICE, json.dumps(choices), "option-4095")


# --- grammars ---

JSON_GBNF = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws   # a comment
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F]
    | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= ([ \t\n] ws)?
"""


@pytest.mark.parametrize("seed", range(3))
def test_random_output_follows_a_recursive_gbnf(seed: int) -> None:
    assert isinstance(json.loads(walk(GrammarKind.EBNF, JSON_GBNF, seed)), dict)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= word "x"\nword ::= [a-z]+', ["ax", "xx"], ["x", "ab"]),
        ("root ::= 'a' # c\n  | [\\u0041-\\u0043]{2} | \"\\x42\"", ["a", "AC", "B"], ["A", "D"]),
        ('root ::= "a"{2,3} b{,1}\nb ::= "b" | ', ["aa", "aaab"], ["a", "aabb"]),
        ('root ::= "é" . [^\\]a-]', ["éxb", "é\nb"], ["éx]", "éx-", "éxa"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", "()"]),
        ('root ::= "a" rest\nrest ::= "b" rest | "c"', ["ac", "abbc"], ["ab", "abcb"]),
        ('root ::= a-b ("," a-b)+\na-b ::= "1"{2}', ["11,11"], ["11", "11,1"]),
        ('start: "a" /[0-9]{2}/ b?\nb: "b" "c"', ["a12", "a12bc"], ["a1", "a12b"]),
    ],
)
def test_gbnf_and_lark(text: str, good: Sequence[str], bad: Sequence[str]) -> None:
    for output in good:
        assert accepts(GrammarKind.EBNF, text, output), output
    for output in bad:
        assert not accepts(GrammarKind.EBNF, text, output), output


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('main ::= "a"', "no rule 'root'"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: a rule is defined twice"),
        ('root ::= "a"\n  other', "line 2: no rule 'other'"),
        ('root ::= ("a"', "line 1: a bracket is not closed"),
        ('root ::= "a" ) "b"', "unexpected"),
        ('root ::= * "a"', "unexpected"),
        ('root ::= "a" {}', "a repeat without a number"),
        ('root ::= "a', "cannot be read"),
        ('"a"\nroot ::= "b"', "must start with its name"),
        ('root ::= "a" ::= "b"', "::= has no name"),
        ("root ::= []", "an empty class"),
        ('root ::= "\\UFFFFFFFF"', "no such character"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
        ("root ::= root", "no output can satisfy it"),
        ("start: nothing", "unknown name"),
        (
            "start: " + "\n".join(f'r{n}: "a" r{n + 1}' for n in range(3000)),
            "3000 rules; the limit is 1000|2999 rules",
        ),
        ("start: T\nT: /a/" + " & /b/" * 30, "more than 8 of & and ~"),
        ('start: %json {"type": "object"}', "may not use %json"),
    ],
)
def test_grammars_that_cannot_be_read(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compiled(GrammarKind.EBNF, text)


def test_marks_inside_quotes_do_not_count() -> None:
    assert accepts(GrammarKind.EBNF, 'start: "&&&&&&&&&&~~" /[&]/ // & & & & & & & & &\n', "&&&&&&&&&&~~&")


def test_a_grammar_without_recursion_is_one_pattern() -> None:
    assert lark_of_gbnf('root ::= a b*\na ::= "x"\nb ::= a | "y"').count("\n") == 1


def test_inlined_rules_stay_within_bounds() -> None:
    text = "root ::= " + "a " * 3000 + '"x"\na ::= ' + "[a-z]" * 100
    assert len(lark_of_gbnf(text)) < 512 * 1024
    assert not accepts(GrammarKind.EBNF, text, "x")


# --- structural tags ---

CALL: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
STRUCTURES = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": "<function=weather>", "schema": CALL, "end": "</function>"},
            {
                "begin": "<function=now>",
                "schema": {"type": "object", "maxProperties": 0},
                "end": "</function>",
            },
        ],
        "triggers": ["<function="],
    }
)


def tagged(**form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


JSON_CALL = {"type": "json_schema", "json_schema": CALL}
ANY = {"type": "any_text"}


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (
            STRUCTURES,
            [
                "",
                "just text, <functio",
                'a <function=weather>{"city":"Rome"}</function> b <function=now>{}</function>',
            ],
            ["<function=other>", "<function=now>{}", '<function=weather>{"city":1}</function>'],
        ),
        (
            tagged(
                type="triggered_tags",
                triggers=["<f="],
                tags=[tag("<f=w>", JSON_CALL, "</f>")],
                at_least_one=True,
            ),
            ['<f=w>{"city":"x"}</f>', '<f=w>{"city":"x"}</f> and then'],
            ["", "text first <f=w>"],
        ),
        (
            tagged(
                type="triggered_tags",
                triggers=["<f="],
                tags=[tag("<f=w>", JSON_CALL, ["</f>", "</g>"])],
                stop_after_first=True,
            ),
            ["text", 'text <f=w>{"city":"x"}</g>'],
            ['<f=w>{"city":"x"}</f> more'],
        ),
        (
            tagged(type="sequence", elements=[tag("<think>", ANY, "</think>"), JSON_CALL]),
            ['<think>so < it goes</think>{"city":"x"}', '<think></think>{"city":"x"}'],
            ["<think>so it goes", '{"city":"x"}', '<think></think><think></think>{"city":"x"}'],
        ),
        (
            tagged(
                type="tags_with_separator",
                tags=[tag("<a>", {"type": "regex", "pattern": "[0-9]+"}, "</a>")],
                separator=", ",
                at_least_one=True,
            ),
            ["<a>1</a>", "<a>1</a>, <a>22</a>"],
            ["", "<a>1</a>, ", "<a>1</a><a>2</a>", "<a>x</a>"],
        ),
        (
            tagged(
                type="or",
                elements=[
                    {"type": "const_string", "value": "yes"},
                    {"type": "grammar", "grammar": 'root ::= "n" "o"+'},
                    {"type": "repeat", "min": 2, "max": 3, "content": {"type": "const_string", "value": "x"}},
                ],
            ),
            ["yes", "nooo", "xx", "xxx"],
            ["", "n", "x", "xxxx"],
        ),
        (
            tagged(
                type="sequence",
                elements=[
                    {"type": "optional", "content": {"type": "const_string", "value": "a"}},
                    {"type": "plus", "content": {"type": "const_string", "value": "b"}},
                    {"type": "star", "content": {"type": "const_string", "value": "c"}},
                ],
            ),
            ["b", "abbc"],
            ["a", "aab"],
        ),
        (tagged(type="any_text", excludes=["bad", "worse"]), ["", "all is well"], ["too bad", "worse"]),
    ],
)
def test_structural_tags(text: str, good: Sequence[str], bad: Sequence[str]) -> None:
    for output in good:
        assert accepts(GrammarKind.STRUCTURAL_TAG, text, output), output
    for output in bad:
        assert not accepts(GrammarKind.STRUCTURAL_TAG, text, output), output


def test_a_special_token_in_a_tag_is_the_token() -> None:
    special = SPECIAL[1]
    token = TOKENIZER.token_to_id(special)
    text = tagged(
        type="triggered_tags",
        triggers=[special],
        tags=[tag(f"{special}go:", {"type": "regex", "pattern": "[0-9]"}, ".")],
    )
    compiler = GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS])
    matcher = compiler.compile(Grammar(GrammarKind.STRUCTURAL_TAG, text)).start()
    assert matcher.accept_all(TOKENIZER.encode("hello").ids)
    assert matcher.accept(token)
    assert allowed(matcher) == {TOKENIZER.token_to_id("g")}
    assert matcher.accept_all(TOKENIZER.encode("go:7.").ids)
    assert token in allowed(matcher)
    spelled = compiler.compile(Grammar(GrammarKind.STRUCTURAL_TAG, text)).start()
    letters = [TOKENIZER.token_to_id(letter) for letter in f"{special}x"]
    assert spelled.accept_all(letters), "the same letters are text"


def test_text_up_to_a_special_token() -> None:
    special = SPECIAL[1]
    token = TOKENIZER.token_to_id(special)
    anything = {"type": "json_schema", "json_schema": True}
    text = tagged(
        type="sequence",
        elements=[
            tag("<t>", {"type": "any_text"}, special),
            anything,
            {"type": "const_string", "value": f"{special}!"},
        ],
    )
    matcher = (
        GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS])
        .compile(Grammar(GrammarKind.STRUCTURAL_TAG, text))
        .start()
    )
    for piece, mark in (("<t>free text", token), ('{"a":[1]}', token), ("!", EOS)):
        assert matcher.accept_all(TOKENIZER.encode(piece).ids), piece
        assert mark in allowed(matcher), piece
        assert matcher.accept(mark)
    assert matcher.is_done


@pytest.mark.parametrize(
    ("form", "kind", "reason"),
    [
        ({"type": "dispatch", "rules": []}, Unsupported, "'dispatch' is not supported; known: const_string"),
        ({"type": "sequence", "elements": [{"type": "token", "token": 3}]}, Unsupported, r"elements\[0\]"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, Unsupported, "style"),
        ({"type": "any_text", "max_tokens": 3}, Unsupported, "limit"),
        (
            {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": {}}]},
            Unsupported,
            "begin with a string",
        ),
        ({"type": "sequence"}, InvalidRequest, "elements must be a list"),
        ({"type": "const_string", "value": 3}, InvalidRequest, "value must be a string"),
        ({"type": "star"}, InvalidRequest, "content must be an object"),
        ({"type": "repeat", "min": "1", "max": 2, "content": ANY}, InvalidRequest, "must be numbers"),
        ({"type": "json_schema", "json_schema": 3}, InvalidRequest, "must be an object"),
        ({"type": "regex", "pattern": "("}, InvalidRequest, "not a regular expression"),
        ({"type": "any_text", "excludes": [1]}, InvalidRequest, "must be a list of strings"),
        (
            {"type": "triggered_tags", "triggers": ["#"], "tags": [tag("<a>", ANY, "</a>")]},
            InvalidRequest,
            "no trigger",
        ),
    ],
)
def test_tags_that_cannot_be_followed(form: dict[str, Any], kind: type[Exception], reason: str) -> None:
    with pytest.raises(kind, match=reason):
        compiled(GrammarKind.STRUCTURAL_TAG, tagged(**form))


# --- schemas that are refused ---


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {}}, "Unimplemented keys.*not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"$ref": "#/$defs/none"}, "has no '#/\\$defs/none'"),
        ({"$ref": "http://elsewhere/x"}, "only refer to its own parts"),
        ({"$ref": "#"}, "no output can satisfy it"),
        ({"enum": []}, "Unsatisfiable"),
        ({"allOf": [{"pattern": f"a{number}"} for number in range(300)]}, "more than 10 patterns"),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(2000)}
                | {"2000": {}},
            },
            "nested more than 250 levels",
        ),
        (
            {
                "$ref": "#/$defs/0",
                "$defs": {str(n): {"pattern": f"a{n}", "$ref": f"#/$defs/{n + 1}"} for n in range(30)}
                | {"30": {}},
            },
            "more than 10 patterns",
        ),
    ],
)
def test_schemas_that_cannot_be_followed(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("text", ["", "3", "true", "{", "[" * 100_000])
def test_text_that_is_no_schema(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        compiled(GrammarKind.JSON_SCHEMA, text)


def test_text_that_is_no_choice_and_no_tag() -> None:
    with pytest.raises(InvalidRequest):
        compiled(GrammarKind.CHOICE, "[1]")
    with pytest.raises(InvalidRequest):
        compiled(GrammarKind.STRUCTURAL_TAG, '{"type":"structural_tag"}')


# --- matchers ---


def test_at_the_end_only_ends_of_sequence_are_allowed() -> None:
    matcher = compiled(GrammarKind.REGEX, "ab?").start()
    a, b = (TOKENIZER.token_to_id(letter) for letter in "ab")
    assert allowed(matcher) == {a}
    assert matcher.accept(a)
    assert allowed(matcher) == {b, EOS, END}
    assert not matcher.is_done
    assert matcher.accept(b)
    assert matcher.is_done
    assert allowed(matcher) == {EOS, END}
    assert matcher.accept(END)
    assert matcher.is_done


def test_an_end_before_the_end_of_a_grammar_that_may_go_on() -> None:
    matcher = compiled(GrammarKind.REGEX, "a*").start()
    assert EOS in allowed(matcher)
    assert matcher.accept(EOS)
    assert matcher.is_done


def test_a_token_that_was_not_allowed_leaves_a_matcher_that_allows_nothing() -> None:
    matcher = compiled(GrammarKind.REGEX, "ab").start()
    assert matcher.error is None
    assert not matcher.accept(TOKENIZER.token_to_id("b"))
    assert allowed(matcher) == set()
    assert not matcher.is_done
    assert "doesn't satisfy the grammar" in (matcher.error or "")
    assert not matcher.accept(10**9)


def test_matchers_of_one_grammar_are_apart_and_resume() -> None:
    one = compiled(GrammarKind.REGEX, "abc")
    a, b, c = (TOKENIZER.token_to_id(letter) for letter in "abc")
    first, second = one.start(), one.start([a, b])
    assert allowed(first) == {a}
    assert allowed(second) == {c}
    with pytest.raises(InvalidRequest, match="prior tokens violate the grammar"):
        one.start([b])


def test_a_mask_of_the_wrong_shape_is_refused() -> None:
    matcher = compiled(GrammarKind.REGEX, "a").start()
    words = compiler().mask_words
    for bad in (
        torch.zeros(words + 1, dtype=torch.int32),
        torch.zeros(words, dtype=torch.int64),
        torch.zeros(words, 2, dtype=torch.int32)[:, 0],
    ):
        with pytest.raises(ValueError, match="a mask is"):
            matcher.fill(bad)


# --- the compiler ---


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens() -> None:
    wide = GrammarCompiler(tokenizer_json(), VOCABULARY + 100, [EOS])
    matcher = wide.compile(Grammar(GrammarKind.REGEX, "(?s).*")).start()
    mask = torch.empty(wide.mask_words, dtype=torch.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    assert wide.mask_words == -(-(VOCABULARY + 100) // 32)
    assert not bits[VOCABULARY:].any()
    narrow = GrammarCompiler(tokenizer_json(), VOCABULARY - 100, [EOS])
    assert narrow.mask_words == -(-VOCABULARY // 32)


def test_tokenizers_that_cannot_be_used() -> None:
    with pytest.raises(Unsupported, match="require a model with an EOS token"):
        GrammarCompiler(tokenizer_json(), VOCABULARY, [])
    words = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    for broken in (b"no json", b"[]", b"{}", json.dumps(words).encode()):
        with pytest.raises(Unsupported, match="not supported with this tokenizer"):
            GrammarCompiler(broken, 10, [0])


def test_what_was_used_last_is_kept() -> None:
    small = GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS], max_grammars=2)
    grammars = [Grammar(GrammarKind.REGEX, letter) for letter in "abc"]
    first, _ = (small.compile(one) for one in grammars[:2])
    assert small.find_compiled(Grammar(GrammarKind.REGEX, "a")) is first
    small.compile(grammars[2])
    assert [small.find_compiled(one) is not None for one in grammars] == [True, False, True]
    assert small.compile(Grammar(GrammarKind.REGEX, "a")) is first
    assert small.num_bytes == sum(small.compile(grammars[n]).num_bytes for n in (0, 2))


def test_what_is_kept_is_bounded_in_bytes() -> None:
    small = GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS], max_bytes=300_000)
    grammars = [Grammar(GrammarKind.REGEX, letter) for letter in "abcdef"]
    for grammar in grammars:
        small.compile(grammar)
    assert [small.find_compiled(one) is not None for one in grammars] == [False] * 4 + [True] * 2
    assert small.num_bytes <= 300_000
    small.compile(Grammar(GrammarKind.CHOICE, json.dumps([f"choice {n}" for n in range(2000)])))
    assert not any(small.find_compiled(one) for one in grammars)
    assert small.num_bytes == 0


def test_a_slow_grammar_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS], timeout_s=0.05)
    go_on = threading.Event()

    def stuck(*_: object, **__: object) -> None:
        go_on.wait(MUST_HAPPEN_S)
        raise ValueError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "LLMatcher", stuck)
        for letter in "ab":
            with pytest.raises(InvalidRequest, match=r"takes longer than 0\.05 s"):
                slow.compile(Grammar(GrammarKind.REGEX, letter))
        with pytest.raises(Overloaded, match="compilation slots are in use"):
            slow.compile(Grammar(GrammarKind.REGEX, "c"))
    stack_size = threading.stack_size()
    go_on.set()
    patient = GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS])
    patient.compile(Grammar(GrammarKind.REGEX, "d"))
    assert threading.stack_size() == stack_size
    for thread in threading.enumerate():
        if thread.name == "kvolt-grammar":
            thread.join(MUST_HAPPEN_S)
    monkeypatch.setattr(slow, "_timeout_s", MUST_HAPPEN_S)
    slow.compile(Grammar(GrammarKind.REGEX, "e"))  # the slots are free again


def test_many_threads_compile_and_match() -> None:
    shared = GrammarCompiler(tokenizer_json(), VOCABULARY, [EOS], max_grammars=3)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mask = torch.empty(shared.mask_words, dtype=torch.int32)
        try:
            for _ in range(20):
                word = rng.choice(["abc", "abd", "xyz", "end", "foo"])
                matcher = shared.compile(Grammar(GrammarKind.REGEX, word)).start()
                for letter in word:
                    matcher.fill(mask)
                    assert matcher.accept(TOKENIZER.token_to_id(letter))
                assert matcher.is_done
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
