"""From what a client wrote to tokens, and back to what it reads: one model's, behind a port.

The default works from the ModelCard alone, so a frontend needs no files. An engine that brings its own
pre- and postprocessing puts another `Processor` in its place: `kvolt.frontend.processors` has them by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import InvalidRequest
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.port import TextParser
from kvolt.frontend.parsers.registry import (
    detect_reasoning_parser,
    detect_tool_parser,
    prompt_opens_reasoning,
    reasoning_parser,
    tool_parser,
)
from kvolt.frontend.templates.dialect import Beyond
from kvolt.frontend.templates.process import Renderer, RenderJob
from kvolt.frontend.templates.template import ChatTemplate
from kvolt.frontend.tokenization.bounded_tokenizer import TooManyTokens
from kvolt.frontend.tokenization.off_loop import OffLoop
from kvolt.frontend.tokenization.token_cache import CachedEncoder, EncoderStats
from kvolt.runtime.clock import Blocking

log = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 32
"""A text that is longer for each token of the context is refused unread: tokenizing it would take some
hundred bytes of memory per character. No language comes near; a page of blanks might."""

_INLINE_CHARACTERS = 16 * 1024
"""A longer text is tokenized in a thread: the loop carries other people's tokens."""

_SHARED_CHARACTERS = 256 * 1024
"""Texts that are longer take seconds: they wait for each other in threads of their own, and hold up nothing else."""

_LARGE_TEXT_THREADS = 2

MOST_CONTEXTS = 4
_COUNTED_TOKENS = 256 * 1024
"""A text that is too long for the context is still tokenized, for the exact number in its refusal, up to this many
contexts and this many tokens. A longer one is refused as soon as it is certain to be too long."""

_TIMEOUT_S = 60.0


NO_PARSER = "none"


class ParserNames(NamedTuple):
    """Which parsers a model's output goes through; None for none."""

    tools: str | None
    reasoning: str | None


class ProcessorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a processor is made with, besides its card."""

    blocking: Blocking
    """Where it does what takes long."""
    cache_bytes: int
    parsers: ParserNames = ParserNames(None, None)
    """The operator's, which beat the card's."""
    wall: Callable[[], float] | None = None
    """For templates that ask what day it is."""
    monotonic: Callable[[], float] | None = None
    """Bounds a rendering on the event loop."""
    renderer: Renderer | None = None
    """Renders what does not belong on the event loop; None: one of the processor's own."""
    large_texts: OffLoop | None = None
    """Tokenizes large texts of all models of a frontend; None: one of the processor's own."""


def new_large_texts(blocking: Blocking) -> OffLoop:
    return OffLoop(blocking, "large-texts", _LARGE_TEXT_THREADS)


class AskedChat(NamedTuple):
    """A chat whose answer is to be read."""

    given: TemplateInput
    prompt: str
    """As it was rendered; "" where the client brought tokens."""
    token_ids: Sequence[int]
    may_call: bool = False
    """The model has tools, and whether it uses them is its own choice."""
    max_calls: int | None = None
    """Calls beyond are not told: without parallel calls a client is promised at most one."""


class Reading(NamedTuple):
    """How the answer to one chat is read."""

    new_parser: Callable[[], TextParser | None]
    """For each choice its own; None where there is nothing to find."""
    shows_special: bool = False
    """The parsers look for special tokens, which must be in the text that they are given."""


class Processor(Protocol):
    """The port."""

    vocabulary: Vocabulary
    parsers: ParserNames

    @property
    def stats(self) -> EncoderStats:
        """Of its tokenization cache."""
        ...

    takes_tools: bool
    """The model's template has a place for tools."""

    async def render(self, given: TemplateInput) -> str:
        """A conversation as the text of a prompt. InvalidRequest when the model's template refuses it."""
        ...

    async def encode(
        self, texts: Sequence[str], param: str, with_special: bool = False
    ) -> list[tuple[int, ...]]:
        """The tokens of each text. `param` is what the client called them.

        With special tokens the model's own are put around each, as a bare text needs them; a chat template
        has written them already.
        """
        ...

    def reading(self, chat: AskedChat) -> Reading:
        """How to read its answer. InvalidRequest for a chat that the parsers cannot go with."""
        ...


NewProcessor = Callable[[ModelCard, ProcessorSpec], Processor]


class CardProcessor:
    """Works from a card."""

    def __init__(self, card: ModelCard, spec: ProcessorSpec) -> None:
        override = spec.parsers
        self.vocabulary = Vocabulary(card.tokenizer_json)
        self.parsers = ParserNames(
            _chosen(override.tools or card.tool_parser, detect_tool_parser, card.chat_template),
            _chosen(override.reasoning or card.reasoning_parser, detect_reasoning_parser, card.chat_template),
        )
        check_parsers(self.parsers)
        self._encoder = CachedEncoder(self.vocabulary.tokenizer, spec.cache_bytes)
        self._markers = self._marker_texts(card)
        self._template = ChatTemplate(
            card.chat_template, *self._markers, wall=spec.wall, monotonic=spec.monotonic
        )
        self._wall = spec.wall
        self._renderer = spec.renderer or Renderer(spec.blocking)
        self.takes_tools = self._template.supports_tools
        self._blocking = spec.blocking
        self._large_texts = spec.large_texts or new_large_texts(spec.blocking)
        self._around = _special_around(self.vocabulary)
        self._context_length = card.context_length
        self._most_characters = _CHARACTERS_PER_TOKEN * card.context_length

    @property
    def stats(self) -> EncoderStats:
        return self._encoder.stats

    def _marker_texts(self, card: ModelCard) -> tuple[str, str]:
        """The texts of the tokens that begin and end a sequence, which templates like to name."""
        ids = (card.bos_token_id, card.eos_token_ids[0] if card.eos_token_ids else None)
        texts = [self.vocabulary.decode([each], False) if each is not None else "" for each in ids]
        return texts[0], texts[1]

    async def render(self, given: TemplateInput) -> str:
        """Here when it is cheap, else in a process that can be lost."""
        template = self._template
        if template.is_plain and not given.is_large:
            try:
                return template.render_inline(given)
            except Beyond as reason:
                log.debug("rendering elsewhere: %s", reason)
        bos, eos = self._markers
        now = None if self._wall is None else self._wall()
        job = RenderJob.of(given, source=template.source, bos_token=bos, eos_token=eos, now=now)
        return await self._renderer.render(job)

    async def encode(
        self, texts: Sequence[str], param: str, with_special: bool = False
    ) -> list[tuple[int, ...]]:
        for text in texts:
            if len(text) > self._most_characters:
                raise InvalidRequest(
                    f"{len(text)} characters are too many for a context of {self._context_length} tokens",
                    param=param,
                    code="context_length_exceeded",
                )
        num_characters = sum(map(len, texts))
        if num_characters <= _INLINE_CHARACTERS:
            found = [self._encoder.encode(text) for text in texts]
        elif num_characters <= _SHARED_CHARACTERS:
            found = await self._blocking.run(lambda: self._encode_all(texts, param), _TIMEOUT_S)
        else:
            found = await self._large_texts.run(lambda: self._encode_all(texts, param))
        before, after = self._around if with_special else ((), ())
        return [(*before, *ids, *after) for ids in found] if before or after else found

    def _encode_all(self, texts: Sequence[str], param: str) -> list[tuple[int, ...]]:
        found = []
        for text in texts:
            found.append(self._encode_long(text, param))
            if len(texts) > 1 and len(found[-1]) > self._context_length:  # the others need not be read
                raise InvalidRequest(
                    f"this model's maximum context length is {self._context_length} tokens; one of the prompts "
                    f"has {len(found[-1])}",
                    param=param,
                    code="context_length_exceeded",
                )
        return found

    def _encode_long(self, text: str, param: str) -> tuple[int, ...]:
        context = self._context_length
        max_tokens = max(context, min(MOST_CONTEXTS * context, _COUNTED_TOKENS))
        try:
            return self._encoder.encode(text, by_words=False, max_tokens=max_tokens)
        except TooManyTokens:
            raise InvalidRequest(
                f"this model's maximum context length is {context} tokens; the text has more than {max_tokens}",
                param=param,
                code="context_length_exceeded",
            ) from None

    def reading(self, chat: AskedChat) -> Reading:
        calls = self.parsers.tools if chat.may_call else None
        thoughts = self.parsers.reasoning
        if calls is None and thoughts is None:
            return Reading(lambda: None)
        starts_inside = prompt_opens_reasoning(chat.prompt)
        max_calls = (
            chat.max_calls
        )  # and not the chat, which may be megabytes: this is kept until the answer ends

        def new_parser() -> TextParser:
            return ParserChain(
                None if thoughts is None else reasoning_parser(thoughts, starts_inside=starts_inside),
                None if calls is None else tool_parser(calls),
                max_calls=max_calls,
            )

        return Reading(new_parser)


def _chosen(name: str | None, detect: Callable[[str], str | None], chat_template: str) -> str | None:
    """By name, `none` for no parser at all, or as the chat template shows."""
    if name is None:
        return detect(chat_template)
    return None if name == NO_PARSER else name


def _special_around(vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text when it is asked to."""
    tokenizer = vocabulary.tokenizer
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def check_parsers(names: ParserNames) -> None:
    """ConfigError for a name that nobody knows: now, and not at the first request."""
    if names.tools not in (None, NO_PARSER):
        tool_parser(names.tools)
    if names.reasoning not in (None, NO_PARSER):
        reasoning_parser(names.reasoning)
