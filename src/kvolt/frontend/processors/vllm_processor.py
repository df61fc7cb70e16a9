"""The processor `vllm`: renders prompts and parses output with vLLM's code, as `vllm serve` would.

Based on the model card: its `tokenizer.json` is converted to the tokenizer for vLLM's code, and its template is
passed as with `--chat-template`. Tokenization is kvolt's own, which gives the same ids as vLLM's.

Not supported: models for which vLLM has a special renderer (Mistral's tokenizer, gpt-oss, DeepSeek 3.2 and 4, Kimi
K3), media, and the structural tags that vLLM adds for strict tools. Unlike kvolt's processor, vLLM's does not limit
the resources of a template.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.port import TextParser
from kvolt.frontend.parsers.registry import detect_reasoning_parser, detect_tool_parser
from kvolt.frontend.processors.added_tokens import AddedTokens
from kvolt.frontend.processors.vllm_chat import chat_request, render_chat, vllm_refusals
from kvolt.frontend.processors.vllm_parser import VllmParser
from kvolt.frontend.processors.vllm_symbols import known_names
from kvolt.frontend.tokenization.preprocess import (
    NO_PARSER,
    CardProcessor,
    ParserNames,
    ParserSpec,
    ProcessorSpec,
    RenderedChat,
    new_large_texts,
)
from kvolt.frontend.tokenization.token_cache import EncoderStats

log = logging.getLogger(__name__)


class VllmProcessor:
    """Processor that uses vLLM; `check_vllm` must have passed."""

    def __init__(self, card: ModelCard, spec: ProcessorSpec) -> None:
        card_without_parsers = replace(card, chat_template="", tool_parser=None, reasoning_parser=None)
        no_parsers = ParserNames(NO_PARSER, NO_PARSER)
        self._tokens = CardProcessor(card_without_parsers, replace(spec, parsers=no_parsers))
        self.vocabulary: Vocabulary = self._tokens.vocabulary
        self._template = card.chat_template
        self._large = spec.large_texts or new_large_texts(spec.blocking)
        self.supports_tools = "tools" in card.chat_template
        self._tokenizer = _hugging_face(self.vocabulary, card)
        self._added = AddedTokens(self.vocabulary.tokenizer)
        named = spec.parsers
        self.parsers = known_names(
            ParserNames(named.tools or card.tool_parser, named.reasoning or card.reasoning_parser)
        )
        self._parser_class = _find_parser_class(self.parsers, self._tokenizer, card.name)
        _log_unselected(card, named)

    @property
    def stats(self) -> EncoderStats:
        return self._tokens.stats

    async def render(self, template_input: TemplateInput) -> str:
        if not self._template.strip():
            raise InvalidRequest("this model has no chat template: use completions instead", param="messages")
        if template_input.is_large:
            render = partial(render_chat, template_input, self._template, self._tokenizer)
            return await self._large.run(render)
        return render_chat(template_input, self._template, self._tokenizer)

    async def encode(
        self, texts: Sequence[str], param: str, with_special: bool = False
    ) -> list[tuple[int, ...]]:
        return await self._tokens.encode(texts, param, with_special)

    def parser_spec(self, chat: RenderedChat) -> ParserSpec:
        """Also needed without tools: some of vLLM's parsers then drop calls that the model makes anyway."""
        parser_class = self._parser_class
        if parser_class is None:
            return ParserSpec(lambda: None)
        with vllm_refusals():
            # Without messages: vLLM would use only their number of calls, for ids that are generated here.
            request = chat_request(chat.template_input._replace(messages=[]), chat.may_call)
            kwargs = request.build_chat_params(self._template, "auto").chat_template_kwargs
            if chat.may_call or parser_class.reasoning_parser_cls or parser_class.always_adjust_request:
                first = parser_class(self._tokenizer, request.tools, chat_template_kwargs=kwargs)
                request = first.adjust_request(request)
        prompt, max_calls, encode = chat.token_ids, chat.max_calls, self._ids

        def new_parser() -> TextParser:
            own = parser_class(self._tokenizer, request.tools, chat_template_kwargs=kwargs)
            parser = VllmParser(own, request, prompt, self._added.cutter(), encode)
            return parser if max_calls is None else ParserChain(None, parser, max_calls=max_calls)

        return ParserSpec(new_parser, keep_special_tokens=not request.skip_special_tokens)

    def _ids(self, text: str) -> list[int]:
        return self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def _find_parser_class(names: ParserNames, tokenizer: Any, model: str) -> Any:
    """vLLM parser class for these names, or None without names. Raises ConfigError if the tokenizer lacks a required
    token."""
    from vllm.parser.parser_manager import ParserManager

    try:
        return ParserManager.get_parser(
            tool_parser_name=names.tools,
            reasoning_parser_name=names.reasoning,
            enable_auto_tools=True,
            model_name=model,
            tokenizer=tokenizer,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"vLLM's parsers do not support {model!r}: {error}",
            key="reasoning_parser" if names.reasoning is not None else "tool_parser",
            remedy="use the parser that this model was trained for, or none",
        ) from error


def _hugging_face(vocabulary: Vocabulary, card: ModelCard) -> Any:
    """A Hugging Face tokenizer for vLLM's code, which is a copy of ours. Templates use the BOS and EOS tokens by
    name; a card has no others."""
    from transformers import PreTrainedTokenizerFast
    from vllm.tokenizers.hf import get_cached_tokenizer

    marks = {"bos_token": card.bos_token_id, "eos_token": next(iter(card.eos_token_ids), None)}
    texts = {
        name: vocabulary.tokenizer.id_to_token(token_id)
        for name, token_id in marks.items()
        if token_id is not None
    }
    new_tokenizer: Any = PreTrainedTokenizerFast
    made = new_tokenizer(tokenizer_object=vocabulary.tokenizer, **texts)
    made.model_max_length = card.context_length
    return get_cached_tokenizer(made)


def _log_unselected(card: ModelCard, named: ParserNames) -> None:
    """Log which parsers kvolt would have detected: with vLLM, parsers must be selected explicitly."""
    for flag, selected, detected in (
        ("--tool-parser", named.tools or card.tool_parser, detect_tool_parser(card.chat_template)),
        (
            "--reasoning-parser",
            named.reasoning or card.reasoning_parser,
            detect_reasoning_parser(card.chat_template),
        ),
    ):
        if selected is None and detected is not None:
            log.warning(
                "parser not selected: model=%s; the processor vllm detects none, try %s %s",
                card.name,
                flag,
                detected,
            )
