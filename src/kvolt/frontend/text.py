"""Between text and tokens, for one model card."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvolt.core.card import ModelCard
from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai import ChatMessage

_MARGIN = 4
"""For tokenizers that drop or fold characters before they cut the text."""

_TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""A template is the model's code run on the caller's values: it fails in any way that expressions can."""


class Codec:
    """A card's tokenizer and chat template, built once."""

    def __init__(self, card: ModelCard) -> None:
        self._tokenizer = Tokenizer.from_buffer(card.tokenizer_json)
        vocabulary = self._tokenizer.get_vocab()
        self.vocabulary_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest id; some vocabularies have holes below it."""
        longest = max(map(len, vocabulary), default=1)
        self.most_characters = _MARGIN * longest * card.context_length
        """A longer text cannot fit into the context, whatever it says."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(card.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=True)
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error

    def decoder(self) -> Decoder:
        return Decoder(self._tokenizer)


class Decoder:
    """Turns one choice's tokens into text as they come; holds back half of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token_ids: Sequence[int]) -> str:
        return "".join(self._stream.step(self._tokenizer, token_id) or "" for token_id in token_ids)
