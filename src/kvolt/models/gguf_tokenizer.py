"""Builds a Hugging Face `tokenizer.json` from the tokenizer metadata of a GGUF file.

Owns llama.cpp's names for vocabularies and pre-tokenizers. Supports byte-level BPE (`gpt2`) and sentencepiece BPE
with byte fallback (`llama`). Must not know files, weights or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from kvolt.core.errors import ConfigError

Metadata = Mapping[str, Any]
Json = dict[str, Any]

_SPACE = "\u2581"  # sentencepiece's mark of a space

_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_TAIL


class _Splits(NamedTuple):
    """A pre-tokenizer: each pattern splits the pieces left by the ones before it."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token itself is not split by merges."""
    add_bos: bool = False
    """Default if the file does not say."""
    composed: bool = False
    """Text is normalised to NFC first, as by the model's own tokenizer."""


_PRE_TOKENIZERS = {
    "default": _Splits((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "exaone4"), _Splits((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _Splits((_DIGIT, _GPT2)),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0"),
        _Splits((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Splits((_LLAMA3,))),
    "qwen2": _Splits((_QWEN2,), composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), _Splits((_QWEN2,))),
    "tekken": _Splits((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Splits((_GPT4O,))),
    "deepseek-coder": _Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
}

_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Control tokens that end an answer. A file names only one of them, often not that of its template."""


class _Kind(IntEnum):
    """Token type in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer_json(metadata: Metadata) -> bytes:
    """Build the tokenizer. ConfigError for an unknown vocabulary type or pre-tokenizer."""
    ready = metadata.get("tokenizer.huggingface.json")
    if ready:
        return str(ready).encode()
    tokens = _list_of(metadata, "tokens", str)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        document, add_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        document, add_bos = _sentencepiece(metadata, tokens)
    else:
        raise ConfigError(
            f"the GGUF tokenizer model {model} is not supported",
            key="model",
            remedy="supported: gpt2, llama",
        )
    document |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "post_processor": _post_processor(metadata, tokens, add_bos),
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def special_token_id(metadata: Metadata, name: str) -> int | None:
    """Id of `bos`, `eos`, `eot`, `eom` or `unknown`; None if the file has none."""
    default = None
    if metadata.get("tokenizer.ggml.model") == "llama":  # sentencepiece files may omit the usual ones
        default = {"unknown": 0, "bos": 1, "eos": 2}.get(name)
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", ()))
    return token_id if isinstance(token_id, int) and 0 <= token_id < num_tokens else None


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """EOS ids: those named in the file, then the other control tokens that end an answer."""
    named = [special_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    tokens, kinds = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    control = {
        token: at
        for at, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _Kind.CONTROL
    }
    known = [control.get(text) for text in _ENDS]
    return tuple(dict.fromkeys(each for each in named + known if each is not None))


def _byte_level(metadata: Metadata, tokens: Sequence[str]) -> tuple[Json, bool]:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    splits = _PRE_TOKENIZERS.get(name)
    if splits is None:
        raise ConfigError(
            f"the GGUF pre-tokenizer {name} is not supported",
            key="model",
            remedy=f"supported: {', '.join(sorted(_PRE_TOKENIZERS))}",
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "normalizer": {"type": "NFC"} if splits.composed else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_cut, splits.patterns), byte_level]},
        "decoder": byte_level,
        "model": _bpe(
            _vocabulary(tokens), _list_of(metadata, "merges", str), ignore_merges=splits.ignore_merges
        ),
    }
    return document, splits.add_bos


def _cut(pattern: str) -> Json:
    if pattern == _DIGIT:  # an equivalent form that models' tokenizers use and frontends recognise
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sentencepiece(metadata: Metadata, tokens: Sequence[str]) -> tuple[Json, bool]:
    """Like sentencepiece and llama.cpp, prepend the space mark to every piece of text, even to one that
    starts with a space or follows a special token."""
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    vocabulary = _vocabulary(tokens)
    unknown = special_token_id(metadata, "unknown")
    document = {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocabulary,
            _sentencepiece_merges(metadata, tokens, vocabulary),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        ),
    }
    return document, True


def _sentencepiece_merges(
    metadata: Metadata, tokens: Sequence[str], vocabulary: Mapping[str, int]
) -> list[str]:
    """Merges equivalent to the scores: every split of a token into two others, best score first. Among equal
    scores longer left parts come first, as in transformers."""
    if "tokenizer.ggml.merges" in metadata:
        return _list_of(metadata, "merges", str)
    scores = _list_of(metadata, "scores", float | int)
    kinds = metadata.get("tokenizer.ggml.token_type") or [_Kind.NORMAL] * len(tokens)
    mergeable = {_Kind.NORMAL, _Kind.USER_DEFINED, _Kind.UNUSED}
    parts = {
        token
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in mergeable and token in vocabulary and " " not in token  # spaces were replaced
    }
    merges = []
    for token, score in zip(tokens, scores, strict=False):
        if token not in parts:
            continue
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        splits = [(left, right) for left, right in halves if left in parts and right in parts]
        splits.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in splits]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [f"{left} {right}" for *_, left, right in merges]


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[str], **options: object) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token to id, without padding placeholders; the first of duplicate tokens."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token and token != f"[PAD{index}]":
            vocabulary.setdefault(token, index)
    return vocabulary


def _added_tokens(metadata: Metadata, tokens: Sequence[str]) -> list[Json]:
    """Tokens matched as a whole in text: control tokens, which are special, and user-defined ones."""
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    special = {_Kind.CONTROL, _Kind.UNKNOWN}
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token and (kind in special or kind == _Kind.USER_DEFINED)
    ]


def _post_processor(metadata: Metadata, tokens: Sequence[str], add_bos: bool) -> Json | None:
    """Adds BOS and EOS to a text if the file says so."""
    bos = special_token_id(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = special_token_id(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return None
    around = {tokens[each]: each for each in (bos, eos) if each is not None}

    def marked(sequence: str, type_id: int) -> list[Json]:
        parts: list[Json | None] = [
            None if bos is None else {"SpecialToken": {"id": tokens[bos], "type_id": type_id}},
            {"Sequence": {"id": sequence, "type_id": type_id}},
            None if eos is None else {"SpecialToken": {"id": tokens[eos], "type_id": type_id}},
        ]
        return [part for part in parts if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": marked("A", 0),
        "pair": marked("A", 0) + marked("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in around.items()
        },
    }


def _list_of(metadata: Metadata, name: str, kind: Any) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        raise ConfigError(f"the GGUF metadata have no list tokenizer.ggml.{name}", key="model")
    return values
