"""`--processor vllm`: prompts rendered and answers read by vLLM's own code, as `vllm serve` would.

From a model's card, as ever: its `tokenizer.json` becomes the tokenizer that vLLM's code wants, its template is given
to it as `--chat-template` would. Text becomes tokens as with our own processor, which gives the same ids as vLLM's.

What is not here: models for which vLLM has a renderer in the place of a template (Mistral's own tokenizer, gpt-oss,
DeepSeek 3.2 and 4, Kimi K3), media, and the structural tags that vLLM would hold the engine to for strict tools. Our
own processor bounds what a template may do; vLLM's does not.
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
    AskedChat,
    CardProcessor,
    ParserNames,
    ProcessorSpec,
    Reading,
    new_large_texts,
)
from kvolt.frontend.tokenization.token_cache import EncoderStats

log = logging.getLogger(__name__)


class VllmProcessor:
    """A Processor; needs vLLM (`check_vllm` has seen to that)."""

    def __init__(self, card: ModelCard, spec: ProcessorSpec) -> None:
        bare = replace(card, chat_template="", tool_parser=None, reasoning_parser=None)
        nothing = ParserNames(NO_PARSER, NO_PARSER)
        self._tokens = CardProcessor(bare, replace(spec, parsers=nothing))
        self.vocabulary: Vocabulary = self._tokens.vocabulary
        self._template = card.chat_template
        self._large = spec.large_texts or new_large_texts(spec.blocking)
        self.takes_tools = "tools" in card.chat_template
        self._tokenizer = _hugging_face(self.vocabulary, card)
        self._added = AddedTokens(self.vocabulary.tokenizer)
        named = spec.parsers
        self.parsers = known_names(
            ParserNames(named.tools or card.tool_parser, named.reasoning or card.reasoning_parser)
        )
        self._parser_class = _composed(self.parsers, self._tokenizer, card.name)
        _tell_unnamed(card, named)

    @property
    def stats(self) -> EncoderStats:
        return self._tokens.stats

    async def render(self, given: TemplateInput) -> str:
        if not self._template.strip():
            raise InvalidRequest(
                "this model has no chat template: it takes completions only", param="messages"
            )
        if given.is_large:
            render = partial(render_chat, given, self._template, self._tokenizer)
            return await self._large.run(render)
        return render_chat(given, self._template, self._tokenizer)

    async def encode(
        self, texts: Sequence[str], param: str, with_special: bool = False
    ) -> list[tuple[int, ...]]:
        return await self._tokens.encode(texts, param, with_special)

    def reading(self, chat: AskedChat) -> Reading:
        """Also where the model has no tools: some of vLLM's parsers then drop calls that it makes all the same."""
        parser_class = self._parser_class
        if parser_class is None:
            return Reading(lambda: None)
        with vllm_refusals():
            # No messages: only their number of calls would be looked at, for ids that are ours to give.
            request = chat_request(chat.given._replace(messages=[]), chat.may_call)
            kwargs = request.build_chat_params(self._template, "auto").chat_template_kwargs
            if chat.may_call or parser_class.reasoning_parser_cls or parser_class.always_adjust_request:
                first = parser_class(self._tokenizer, request.tools, chat_template_kwargs=kwargs)
                request = first.adjust_request(request)
        prompt, max_calls, encode = chat.token_ids, chat.max_calls, self._ids

        def new_parser() -> TextParser:
            own = parser_class(self._tokenizer, request.tools, chat_template_kwargs=kwargs)
            parser = VllmParser(own, request, prompt, self._added.cutter(), encode)
            return parser if max_calls is None else ParserChain(None, parser, max_calls=max_calls)

        return Reading(new_parser, shows_special=not request.skip_special_tokens)

    def _ids(self, text: str) -> list[int]:
        return self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def _composed(names: ParserNames, tokenizer: Any, model: str) -> Any:
    """The class that reads both, or None where nobody is named. ConfigError for a tokenizer that lacks what a parser
    looks for."""
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
            f"vLLM's parsers do not go with {model!r}: {error}",
            key="reasoning_parser" if names.reasoning is not None else "tool_parser",
            remedy="name the parser that this model was trained for, or none",
        ) from error


def _hugging_face(vocabulary: Vocabulary, card: ModelCard) -> Any:
    """The tokenizer as vLLM's code wants it, which is a copy of ours. Templates know the tokens that begin and end a
    sequence by name; a card has no others."""
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


def _tell_unnamed(card: ModelCard, named: ParserNames) -> None:
    """vLLM has nobody choose a parser by the template, and so neither has this: what our own would have chosen."""
    for flag, given, found in (
        ("--tool-parser", named.tools or card.tool_parser, detect_tool_parser(card.chat_template)),
        (
            "--reasoning-parser",
            named.reasoning or card.reasoning_parser,
            detect_reasoning_parser(card.chat_template),
        ),
    ):
        if given is None and found is not None:
            log.warning(
                "%s: vLLM's processor chooses no parser by the template; try %s %s", card.name, flag, found
            )
