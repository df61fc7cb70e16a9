"""The model that both systems serve: a tokenizer and a chat template, no weights.

The tokenizer is trained on the standard library's source, so that the folder needs no download. It may
differ between Python versions; both systems of a run read the same one.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import msgspec

NAME = "tiny"
EOS_TOKEN = "<|im_end|>"

_SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS_TOKEN)
_VOCABULARY_SIZE = 16_000
_NUM_SOURCE_FILES = 150
_CONTEXT_TOKENS = 32_768

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TinyModel(msgspec.Struct, frozen=True):
    """A model folder as Hugging Face lays it out."""

    path: Path

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def chat_template(self) -> str:
        return str(json.loads((self.path / "tokenizer_config.json").read_text())["chat_template"])


def tiny_model(path: Path) -> TinyModel:
    """The model in this folder, made if it is not there."""
    model = TinyModel(path)
    if not model.tokenizer_path.exists():
        _make(path)
    return model


def _make(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))[:_NUM_SOURCE_FILES]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=list(_SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train(sources, trainer)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    eos = tokenizer.token_to_id(EOS_TOKEN)
    documents = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "pad_token": _SPECIAL[0],
            "model_max_length": _CONTEXT_TOKENS,
            "chat_template": _CHAT_TEMPLATE,
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in _SPECIAL
            },
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": _VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": _CONTEXT_TOKENS,
            "eos_token_id": eos,
            "bos_token_id": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"eos_token_id": eos},
    }
    for name, document in documents.items():
        (path / name).write_text(json.dumps(document))
    tokenizer.save(str(path / "tokenizer.json"))  # last: its presence says that the folder is whole
