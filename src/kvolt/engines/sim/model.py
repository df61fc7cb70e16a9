"""The simulated model: a small generated tokenizer, or another model's, and the words of its answers.

The generated tokenizer is byte-level BPE over a fixed word list. Every merge starts at a word's leading space, so
merges never compete and the file is the same on every machine: equal cards have equal hashes. Any text round-trips,
since single bytes are tokens.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import msgspec

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2

CHAT_TEMPLATE = r"""
{%- set has_system = messages and messages[0]['role'] == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if has_system %}
        {{- messages[0]['content'] }}{{ '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {%- if loop.first or loop.previtem['role'] != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{ message['content'] }}{{ '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem['role'] != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif not (tools and has_system and loop.first) %}
        {{- '<|im_start|>' }}{{ message['role'] }}
        {%- if message['content'] or not message['tool_calls'] %}
            {{- '\n' }}{{ message['content'] or '' }}
        {%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {%- set function = call['function'] or call %}
            {{- '\n<tool_call>\n{"name": ' }}{{ function['name'] | tojson }}{{ ', "arguments": ' }}
            {%- if function['arguments'] is string %}
                {{- function['arguments'] }}
            {%- else %}
                {{- function['arguments'] | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
"""Like Qwen's: tools and calls in the hermes format, and an empty thought if thinking is disabled."""

_WORD_LIST = """
the of and to in is that it for on with as are this be by from at have or one had not but what all
were when we there can an your which their said if do will each about how up out them then she many
some so these would other into has more her two like him see time could no make than first been its
who now people my made over did down only way find use may water long little very after words called
just where most know get through back much go good new write our me man too any day same right look
think also around another came come work three must because does part even place well such here take
why help put different away again off went old number great tell men say small every found still
between name should home big give air line set own under read last never us left end along while
might next sound below saw something thought both few those always show large often together asked
house world going want school important until form food keep children feet land side without boy
once animal life enough took four head above kind began almost live page got earth need far hand
high year mother light country father let night picture being study second soon story since white
ever paper hard near sentence better best across during today however sure knew try told young sun
thing whole hear example heard several change answer room sea against top turned learn point city
play toward five himself
"""

WORDS = tuple(_WORD_LIST.split())


@cache
def _byte_symbols() -> dict[int, str]:
    """GPT-2's printable characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    for shift, byte in enumerate(byte for byte in range(256) if byte not in symbols):
        symbols[byte] = chr(256 + shift)
    return symbols


@cache
def _vocabulary() -> tuple[dict[str, int], list[str]]:
    symbols = _byte_symbols()
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for byte in range(256):
        vocabulary[symbols[byte]] = len(vocabulary)
    merges: list[str] = []
    for word in WORDS:
        prefix = symbols[ord(" ")]
        for letter in word:
            grown = prefix + letter
            if grown not in vocabulary:
                vocabulary[grown] = len(vocabulary)
                merges.append(f"{prefix} {letter}")
            prefix = grown
    return vocabulary, merges


@cache
def word_token_ids() -> tuple[int, ...]:
    """Tokens of generated answers: whole words with their leading space."""
    vocabulary, _ = _vocabulary()
    space = _byte_symbols()[ord(" ")]
    return tuple(vocabulary[space + word] for word in WORDS)


@cache
def tokenizer_json() -> bytes:
    vocabulary, merges = _vocabulary()
    added = [
        {
            "id": vocabulary[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in SPECIAL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def sim_card(name: str, context_length: int, block_size: int) -> ModelCard:
    return ModelCard(
        name=name,
        tokenizer_json=tokenizer_json(),
        chat_template=CHAT_TEMPLATE,
        context_length=context_length,
        block_size=block_size,
        eos_token_ids=(EOS,),
    )


class SimModel(msgspec.Struct, frozen=True):
    """A card, and the tokens of generated answers."""

    card: ModelCard
    words: tuple[int, ...]
    vocabulary_size: int


def generated_model(card: ModelCard) -> SimModel:
    """The model with the generated tokenizer."""
    return SimModel(card, word_token_ids(), len(_vocabulary()[0]))


def model_with_tokenizer(card: ModelCard, path: str, eos_token: str, bos_token: str | None) -> SimModel:
    """The model with the tokenizer.json of another model."""
    from tokenizers import Tokenizer

    raw = _read(path, "model_tokenizer")
    try:
        tokenizer = Tokenizer.from_buffer(raw)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a tokenizer: {error}", key="args.model_tokenizer", remedy="use a tokenizer.json"
        ) from error
    vocabulary = tokenizer.get_vocab()
    words = _plain_words(vocabulary)
    if not words:
        raise ConfigError(
            f"{path} has no words to generate answers from",
            key="args.model_tokenizer",
            remedy="use another one",
        )
    card = msgspec.structs.replace(
        card,
        tokenizer_json=raw,
        eos_token_ids=(_find(vocabulary, eos_token, "eos_token"),),
        bos_token_id=None if bos_token is None else _find(vocabulary, bos_token, "bos_token"),
    )
    return SimModel(card, words, max(vocabulary.values()) + 1)


def read_template(template: str) -> str:
    """A chat template; text without a brace is the path of one."""
    if "{" in template:
        return template
    try:
        return _read(template, "chat_template").decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{template} is not UTF-8", key="args.chat_template") from error


def _read(path: str, argument: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path!r} cannot be read: {error}", key=f"args.{argument}", remedy="use an existing file"
        ) from error


def _find(vocabulary: dict[str, int], token: str, argument: str) -> int:
    try:
        return vocabulary[token]
    except KeyError:
        raise ConfigError(
            f"the vocabulary has no token {token!r}",
            key=f"args.{argument}",
            remedy="use a token of model_tokenizer",
        ) from None


def _plain_words(vocabulary: dict[str, int]) -> tuple[int, ...]:
    """The first whole words by id, with a leading space mark if the tokenizer uses one."""
    for pattern in ("[\u0120\u2581][A-Za-z]{2,}", "[A-Za-z]{2,}"):
        matches = re.compile(pattern).fullmatch
        words = sorted(token_id for text, token_id in vocabulary.items() if matches(text))
        if words:
            return tuple(words[: len(WORDS)])
    return ()
