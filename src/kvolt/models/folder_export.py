"""Provides a model as a folder in Hugging Face's layout, for external engines; GGUF files are converted.

Converted folders are kept in the cache directory under the hash of the weights and are written atomically.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvolt.core.errors import ConfigError
from kvolt.models.config import LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope
from kvolt.models.model_files import ModelKind
from kvolt.models.resolve import Resolved
from kvolt.runtime.host.environment import cache_directory

log = logging.getLogger(__name__)

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_EXACT_WEIGHTS = 1_000_000_000
"""Models with up to this many weights are written as float32, which is exact; larger ones as bfloat16."""


def folder_of(model: Resolved, cache_dir: Path | None = None) -> Path:
    """The folder of a model. ConfigError if a GGUF file cannot be converted."""
    if model.kind is not ModelKind.GGUF:
        return Path(model.path)
    from kvolt.models.gguf_file import GgufFile

    checkpoint = GgufFile(Path(model.path))
    folders = (cache_directory() if cache_dir is None else cache_dir) / "folders"
    target = folders / f"{Path(model.path).stem}-{checkpoint.weights_hash[:16]}"
    if target.is_dir():
        return target
    log.info("converting GGUF to safetensors: model=%s folder=%s", model.name, target)
    try:
        folders.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folders))
        try:
            _write(checkpoint, part)
            part.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process has written it
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error}", key="model", remedy="free disk space, or set KVOLT_HOME"
        ) from error
    return target


def _write(checkpoint: Any, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    config: ModelConfig = checkpoint.config
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    is_exact = sum(each.numel() for each in tensors.values()) <= _EXACT_WEIGHTS
    dtype = torch.float32 if is_exact else torch.bfloat16
    stored = {name: each.to(dtype).contiguous() for name, each in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(
        folder / "config.json", hf_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": list(config.eos_token_ids)})
    (folder / "tokenizer.json").write_bytes(checkpoint.tokenizer_json)
    texts = _token_texts(checkpoint.tokenizer_json)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": texts.get(config.eos_token_ids[0]) if config.eos_token_ids else None,
            "bos_token": None if config.bos_token_id is None else texts.get(config.bos_token_id),
            "chat_template": checkpoint.chat_template or None,
        },
    )


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model config; the inverse of `read_hf_config`."""
    return {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _stated_context(config),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "use_sliding_window": False,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
    }


def _stated_context(config: ModelConfig) -> int:
    """The context length before linear scaling."""
    scaling = config.rope_scaling
    factor = scaling.factor if isinstance(scaling, LinearRope) else 1.0
    return round(config.context_length / factor)


def _rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearRope(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Rope():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_context_length,
            }
        case YarnRope():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_context_length,
            }
    raise ConfigError(
        "a GGUF file with its own frequency divisors cannot be converted to a folder",
        key="model",
        remedy="use the model's safetensors",
    )


def _token_texts(tokenizer_json: bytes) -> dict[int, str]:
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return {token["id"]: token["content"] for token in added}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
