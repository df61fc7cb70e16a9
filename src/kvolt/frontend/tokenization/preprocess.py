"""Pre- and postprocessing of one model: chat template, tokenizer, output parsers.

The default implementation needs only the ModelCard, so a frontend needs no files. Engines with their own processing
provide another `Processor`; `kvolt.frontend.processors` has them by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import InvalidRequest
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.off_loop import OffLoop
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
from kvolt.frontend.tokenization.token_cache import CachedEncoder, EncoderStats
from kvolt.runtime.clock import Blocking

log = logging.getLogger(__name__)

_CHARACTERS_PER_TOKEN = 32
"""A text with more characters per context token is rejected without tokenizing, which would take some hundred bytes
of memory per character. No language comes near; a page of blanks might."""

_INLINE_CHARACTERS = 16 * 1024
"""A longer text is tokenized in a thread, off the event loop."""

_SHARED_CHARACTERS = 256 * 1024
"""Longer texts take seconds: they are queued for separate threads, and delay nothing else."""

_LARGE_TEXT_THREADS = 2

MAX_CONTEXTS = 4
_COUNTED_TOKENS = 256 * 1024
"""A text that exceeds the context is still tokenized, for the exact number in the error, up to this many contexts and
this many tokens. A longer one is rejected as soon as it is certainly too long."""

_TIMEOUT_S = 60.0


NO_PARSER = "none"


class ParserNames(NamedTuple):
    """Parsers of a model's output; None: no parser."""

    tools: str | None
    reasoning: str | None


class ProcessorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Constructor arguments of a processor, besides its card."""

    blocking: Blocking
    """For work that takes long."""
    cache_bytes: int
    parsers: ParserNames = ParserNames(None, None)
    """The operator's choice; overrides the card's."""
    wall: Callable[[], float] | None = None
    """Clock for templates that use the date."""
    monotonic: Callable[[], float] | None = None
    """Clock that limits renderings on the event loop."""
    renderer: Renderer | None = None
    """Renders templates that must not run on the event loop; None: the processor creates one."""
    large_texts: OffLoop | None = None
    """Tokenizes large texts of all models of a frontend; None: the processor creates one."""


def new_large_texts(blocking: Blocking) -> OffLoop:
    return OffLoop(blocking, "large-texts", _LARGE_TEXT_THREADS)


class RenderedChat(NamedTuple):
    """A rendered chat, as needed to parse its output."""

    template_input: TemplateInput
    prompt: str
    """Rendered prompt; "" if the client sent tokens."""
    token_ids: Sequence[int]
    may_call: bool = False
    """The model has tools, and may call them or not."""
    max_calls: int | None = None
    """Further calls are dropped: clients that disable parallel calls expect at most one."""


class ParserSpec(NamedTuple):
    """How to parse the output of a chat."""

    new_parser: Callable[[], TextParser | None]
    """Create a parser for one choice; None if there is nothing to parse."""
    keep_special_tokens: bool = False
    """The parsers need special tokens in their text."""


class Processor(Protocol):
    """Pre- and postprocessor port."""

    vocabulary: Vocabulary
    parsers: ParserNames

    @property
    def stats(self) -> EncoderStats:
        """Statistics of the tokenization cache."""
        ...

    supports_tools: bool
    """Whether the model's template uses tools."""

    async def render(self, template_input: TemplateInput) -> str:
        """Render a conversation as the text of a prompt; raises InvalidRequest if the template rejects it."""
        ...

    async def encode(
        self, texts: Sequence[str], param: str, with_special: bool = False
    ) -> list[tuple[int, ...]]:
        """Tokens of each text. `param` is the client's field name.

        `with_special` adds the model's special tokens around each text, as for a bare text; a chat template contains
        them.
        """
        ...

    def parser_spec(self, chat: RenderedChat) -> ParserSpec:
        """How to parse the output of a chat. Raises InvalidRequest if the parsers do not support it."""
        ...


NewProcessor = Callable[[ModelCard, ProcessorSpec], Processor]


class CardProcessor:
    """Processor based on the model card."""

    def __init__(self, card: ModelCard, spec: ProcessorSpec) -> None:
        override = spec.parsers
        self.vocabulary = Vocabulary(card.tokenizer_json)
        self.parsers = ParserNames(
            _select(override.tools or card.tool_parser, detect_tool_parser, card.chat_template),
            _select(override.reasoning or card.reasoning_parser, detect_reasoning_parser, card.chat_template),
        )
        check_parsers(self.parsers)
        self._encoder = CachedEncoder(self.vocabulary.tokenizer, spec.cache_bytes)
        self._markers = self._marker_texts(card)
        self._template = ChatTemplate(
            card.chat_template, *self._markers, wall=spec.wall, monotonic=spec.monotonic
        )
        self._wall = spec.wall
        self._renderer = spec.renderer or Renderer(spec.blocking)
        self.supports_tools = self._template.supports_tools
        self._blocking = spec.blocking
        self._large_texts = spec.large_texts or new_large_texts(spec.blocking)
        self._around = _special_around(self.vocabulary)
        self._context_length = card.context_length
        self._max_characters = _CHARACTERS_PER_TOKEN * card.context_length

    @property
    def stats(self) -> EncoderStats:
        return self._encoder.stats

    def _marker_texts(self, card: ModelCard) -> tuple[str, str]:
        """Texts of the BOS and EOS tokens, for templates that use them."""
        ids = (card.bos_token_id, card.eos_token_ids[0] if card.eos_token_ids else None)
        texts = [self.vocabulary.decode([each], False) if each is not None else "" for each in ids]
        return texts[0], texts[1]

    async def render(self, template_input: TemplateInput) -> str:
        """Render on the event loop if cheap, else in a separate process."""
        template = self._template
        if template.is_plain and not template_input.is_large:
            try:
                return template.render_inline(template_input)
            except Beyond as reason:
                log.debug("rendering in a separate process: reason=%s", reason)
        now = None if self._wall is None else self._wall()
        return await self._renderer.render(RenderJob(template.source, *self._markers, now, template_input))

    async def encode(
        self, texts: Sequence[str], param: str, with_special: bool = False
    ) -> list[tuple[int, ...]]:
        for text in texts:
            if len(text) > self._max_characters:
                raise InvalidRequest(
                    f"{len(text)} characters exceed a context of {self._context_length} tokens",
                    param=param,
                    code="context_length_exceeded",
                )
        num_characters = sum(map(len, texts))
        if num_characters <= _INLINE_CHARACTERS:
            all_ids = [self._encoder.encode(text) for text in texts]
        elif num_characters <= _SHARED_CHARACTERS:
            all_ids = await self._blocking.run(lambda: self._encode_all(texts, param), _TIMEOUT_S)
        else:
            all_ids = await self._large_texts.run(lambda: self._encode_all(texts, param))
        before, after = self._around if with_special else ((), ())
        return [(*before, *ids, *after) for ids in all_ids] if before or after else all_ids

    def _encode_all(self, texts: Sequence[str], param: str) -> list[tuple[int, ...]]:
        all_ids = []
        for text in texts:
            all_ids.append(self._encode_long(text, param))
            if len(texts) > 1 and len(all_ids[-1]) > self._context_length:  # skip the other texts
                raise InvalidRequest(
                    f"this model's maximum context length is {self._context_length} tokens; one of the prompts "
                    f"has {len(all_ids[-1])}",
                    param=param,
                    code="context_length_exceeded",
                )
        return all_ids

    def _encode_long(self, text: str, param: str) -> tuple[int, ...]:
        context = self._context_length
        max_tokens = max(context, min(MAX_CONTEXTS * context, _COUNTED_TOKENS))
        try:
            return self._encoder.encode(text, by_words=False, max_tokens=max_tokens)
        except TooManyTokens:
            raise InvalidRequest(
                f"this model's maximum context length is {context} tokens; the text has more than {max_tokens}",
                param=param,
                code="context_length_exceeded",
            ) from None

    def parser_spec(self, chat: RenderedChat) -> ParserSpec:
        calls = self.parsers.tools if chat.may_call else None
        thoughts = self.parsers.reasoning
        if calls is None and thoughts is None:
            return ParserSpec(lambda: None)
        starts_inside = prompt_opens_reasoning(chat.prompt)
        max_calls = (
            chat.max_calls
        )  # not the chat, which may be megabytes: the parser factory is kept until the response ends

        def new_parser() -> TextParser:
            return ParserChain(
                None if thoughts is None else reasoning_parser(thoughts, starts_inside=starts_inside),
                None if calls is None else tool_parser(calls),
                max_calls=max_calls,
            )

        return ParserSpec(new_parser)


def _select(name: str | None, detect: Callable[[str], str | None], chat_template: str) -> str | None:
    """Parser by name, `none` for no parser, or None to detect it from the chat template."""
    if name is None:
        return detect(chat_template)
    return None if name == NO_PARSER else name


def _special_around(vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """Tokens that the tokenizer adds before and after a text with special tokens."""
    tokenizer = vocabulary.tokenizer
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    with_special_ids = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(with_special_ids) - len(plain_ids) + 1):
        if with_special_ids[start : start + len(plain_ids)] == plain_ids:
            return with_special_ids[:start], with_special_ids[start + len(plain_ids) :]
    return [], []


def check_parsers(names: ParserNames) -> None:
    """Raise ConfigError for an unknown parser name, at start instead of at the first request."""
    if names.tools not in (None, NO_PARSER):
        tool_parser(names.tools)
    if names.reasoning not in (None, NO_PARSER):
        reasoning_parser(names.reasoning)
