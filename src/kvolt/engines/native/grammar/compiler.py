"""Grammar constraints: masks of allowed tokens, by llguidance (docs/adr/0007).

    compiled = compiler.compile(request.grammar)      # milliseconds; may run in a thread
    matcher = compiled.start(request.prior_tokens)          # one per choice
    matcher.fill(row)                                 # a packed bitmask for the sampler, each step
    matcher.accept(token)

When the grammar is complete and nothing can follow, only EOS tokens are allowed. A failed matcher (after a
token it did not allow, or a limit of the library) allows nothing: its row fails in the sampler, and `error`
has the reason. Knows no requests and no steps.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.request import Grammar, GrammarKind
from kvolt.engines.native.grammar.lark import lark_of_ebnf
from kvolt.engines.native.grammar.regex import alternatives, regex_source
from kvolt.engines.native.grammar.schema import prepared_schema
from kvolt.engines.native.grammar.tags import lark_of_tag
from kvolt.engines.native.setup import MAX_COMPILING

_MAX_REASON_CHARS = 300
_STACK_BYTES = 64 * 1024 * 1024
_stack_size_lock = threading.Lock()
"""Guards the stack size of new threads, which is a setting of the process."""
_BASE_BYTES = 128 * 1024
_BYTES_PER_CHAR = 64
"""Measured: a compiled grammar uses about 100 KiB and 15 to 110 bytes per character of its source."""


class Matcher:
    """State of one choice in its grammar. Not thread-safe."""

    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def fill(self, row: Tensor) -> None:
        """Write the mask of allowed tokens: int32 on the host, `mask_words` long; bit i % 32 of word i // 32
        is token i."""
        if row.dtype != torch.int32 or row.numel() != self._num_words or not row.is_contiguous():
            raise ValueError(
                f"a mask is {self._num_words} contiguous int32, not {row.dtype} {tuple(row.shape)}"
            )
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), self._num_words * 4)
        if self._matcher.is_error():
            row.zero_()  # the library would allow EOS

    def accept(self, token: int) -> bool:
        """Advance by a token. False, permanently, if the grammar does not allow it."""
        return self._matcher.consume_token(token)

    def accept_all(self, tokens: Sequence[int]) -> bool:
        return not tokens or self._matcher.consume_tokens(list(tokens))

    @property
    def is_done(self) -> bool:
        """Whether the grammar is complete and only EOS can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        return _brief(self._matcher.get_error()) if self._matcher.is_error() else None


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar for one tokenizer. Thread-safe."""

    _first: LLMatcher
    _num_words: int
    num_bytes: int
    """Estimated size."""

    def start(self, prior_tokens: Sequence[int] = ()) -> Matcher:
        """A matcher at the start, or after tokens generated before. InvalidRequest if the grammar does not
        allow these."""
        matcher = Matcher(self._first.deep_copy(), self._num_words)
        if not matcher.accept_all(prior_tokens):
            raise InvalidRequest(
                f"the prior tokens violate the grammar: {matcher.error}", param="prior_tokens"
            )
        return matcher


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with an LRU cache. Thread-safe.

    Unsupported for a tokenizer that the library cannot read: it must be byte-level or have byte fallback.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        max_grammars: int = 256,
        max_bytes: int = 256 * 1024 * 1024,
        timeout_s: float = 10.0,
    ) -> None:
        if not eos_ids:
            raise Unsupported("grammars require a model with an EOS token", feature="grammar")
        self._special = _special_tokens(tokenizer_json)
        self._tokenizer = _tokenizer(tokenizer_json, vocab_size, eos_ids)
        self._limits = LLParserLimits(verbose_errors=False)
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._slots = threading.BoundedSemaphore(MAX_COMPILING)
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self.num_bytes = 0
        """Estimated size of the cache."""
        self.mask_words = -(-self._tokenizer.vocab_size // 32)
        """Length of a mask; more than the model's vocabulary requires if the tokenizer has more tokens."""

    def find_compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        """A grammar in the cache, or None. Counts as a use; does not block."""
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
            return compiled

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar. Blocks for milliseconds, up to the timeout, so it must run in its own thread.

        InvalidRequest if the grammar is invalid, cannot be satisfied, or takes too long; Overloaded while
        slow grammars use all slots.
        """
        compiled = self.find_compiled(grammar)
        if compiled is not None:
            return compiled
        source = self._source(grammar)
        compiled = self._compile_in_thread(grammar, source)
        with self._lock:
            self._store(grammar, compiled)
        return compiled

    def _compile_in_thread(self, grammar: Grammar, source: str) -> CompiledGrammar:
        """Compile in a thread that can be abandoned after the timeout, with a large stack for long chains of rules."""
        if not self._slots.acquire(timeout=self._timeout_s):
            raise Overloaded(
                "all grammar compilation slots are in use", queue="grammars", limit=MAX_COMPILING
            )
        done: SimpleQueue[CompiledGrammar | BaseException] = SimpleQueue()

        def run() -> None:
            try:
                done.put(self._compile(grammar, source))
            except BaseException as error:  # re-raised in the calling thread
                done.put(error)
            finally:
                self._slots.release()

        with _stack_size_lock:
            default_size = threading.stack_size(_STACK_BYTES)
            try:
                threading.Thread(target=run, name="kvolt-grammar", daemon=True).start()
            finally:
                threading.stack_size(default_size)
        try:
            result = done.get(timeout=self._timeout_s)
        except Empty:
            raise InvalidRequest(
                f"the {grammar.kind} grammar takes longer than {self._timeout_s:g} s to compile",
                param="grammar",
            ) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _compile(self, grammar: Grammar, source: str) -> CompiledGrammar:
        first = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if not first.is_error():
            probe = first.deep_copy()
            probe.compute_bitmask()
            if probe.is_error():
                first = probe
        if first.is_error():
            reason = _brief(first.get_error()).replace("NoExtensionBias", "no output can satisfy it")
            raise InvalidRequest(f"the {grammar.kind} grammar cannot be used: {reason}", param="grammar")
        return CompiledGrammar(first, self.mask_words, _BASE_BYTES + _BYTES_PER_CHAR * len(source))

    def _source(self, grammar: Grammar) -> str:
        """The grammar in the library's language. `grammar.text` has the form that the frontend derives from
        requests."""
        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    return _json_source(grammar.text)
                case GrammarKind.JSON_OBJECT:
                    return _json_source('{"type":"object"}')
                case GrammarKind.REGEX:
                    return f"start: /{regex_source(grammar.text)}/"
                case GrammarKind.CHOICE:
                    return f"start: /{alternatives(json.loads(grammar.text))}/"
                case GrammarKind.EBNF:
                    return lark_of_ebnf(grammar.text)
                case GrammarKind.STRUCTURAL_TAG:
                    return lark_of_tag(grammar.text, self._special)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidRequest(
                f"the {grammar.kind} grammar cannot be read: {_brief(str(error))}", param="grammar"
            ) from error

    def _store(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        replaced = self._cache.pop(grammar, None)
        self.num_bytes += compiled.num_bytes - (replaced.num_bytes if replaced else 0)
        self._cache[grammar] = compiled
        while self._cache and (len(self._cache) > self._max_grammars or self.num_bytes > self._max_bytes):
            _, dropped = self._cache.popitem(last=False)
            self.num_bytes -= dropped.num_bytes


def _json_source(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object")
    return LLMatcher.grammar_from_json_schema(prepared_schema(schema))


def _tokenizer(tokenizer_json: bytes, vocab_size: int, eos_ids: Iterable[int]) -> LLTokenizer:
    """The library's tokenizer, with the model's vocabulary size, or its own if that is larger."""
    text, ends = tokenizer_json.decode(), list(eos_ids)
    try:
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
        except ValueError:
            return LLTokenizer(text, eos_token=ends)
    except ValueError as error:
        raise Unsupported(
            f"grammars are not supported with this tokenizer: {_brief(str(error))}", feature="grammar"
        ) from error


def _special_tokens(tokenizer_json: bytes) -> dict[str, int]:
    """Special tokens by their text."""
    try:
        added = json.loads(tokenizer_json).get("added_tokens") or []
    except (ValueError, AttributeError):
        return {}  # the library reports the error
    return {token["content"]: token["id"] for token in added if token.get("special") and token.get("content")}


def _brief(reason: str) -> str:
    """A message of the library as one line."""
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[: _MAX_REASON_CHARS - 1]}…"
