"""The simulated model: a small generated tokenizer and an endless supply of readable tokens.

The tokenizer is byte-level BPE over a fixed word list. Every merge starts at a word's leading space, so
merges never compete and the file is the same on every machine: equal cards, equal hash. Any text
round-trips, since single bytes are tokens.
"""

from __future__ import annotations

import json
from functools import cache

import xxhash

from kvolt.core.card import ModelCard

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

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
    """GPT-2's printable stand-ins for the 256 bytes."""
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
    """The tokens that a simulated answer is made of: whole words with their leading space."""
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


def next_token(seed: int, position: int) -> int:
    """A word that depends on nothing but its arguments, so that a resumed answer goes on unchanged."""
    words = word_token_ids()
    return words[xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed) % len(words)]
