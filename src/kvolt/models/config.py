"""ModelConfig: the shape of a model, read from a Hugging Face `config.json`.

Owns the supported architectures, the checks for unsupported ones, and the rotary frequencies. Must not know file
locations or weight names. GGUF metadata is read in `gguf_file`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.models.json_files import decode_json
from kvolt.models.unsupported_fields import check_hf_fields

if TYPE_CHECKING:
    import torch

LLAMA = "LlamaForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
MISTRAL = "MistralForCausalLM"
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
DTYPES = ("float32", "float16", "bfloat16")

_MISTRAL_WINDOW = 4096  # transformers' default if Mistral's config.json has none
_QWEN3_HEAD_DIM = 128
_MOST_LAYERS = 1024  # a damaged file must not cause millions of tensors to be listed


class LinearRope(msgspec.Struct, frozen=True, tag="linear"):
    factor: float


class Llama3Rope(msgspec.Struct, frozen=True, tag="llama3", kw_only=True):
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


class YarnRope(msgspec.Struct, frozen=True, tag="yarn", kw_only=True):
    factor: float
    original_context_length: int
    attention_factor: float
    """Factor of cosine and sine."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class RopeDivisors(msgspec.Struct, frozen=True, tag="divisors"):
    """One divisor per frequency: the form of llama3 scaling in GGUF files."""

    divisors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | RopeDivisors


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines a forward pass and its KV, independent of the file format."""

    architecture: str
    """One of ARCHITECTURES, by its Hugging Face name."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    context_length: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k before the rotation (Qwen3)."""
    sliding_window: int | None = None
    """The model's attention window; at least `context_length`, so full attention is equivalent."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str = "float32"
    """Stored type of the weights; float32 for quantized ones, which are dequantized to it."""

    def __post_init__(self) -> None:
        """Check the sizes. ConfigError if they are inconsistent."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            _check_positive(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "context_length"):
            _check_positive(name, getattr(self, name))
        if self.num_layers > _MOST_LAYERS:
            raise ConfigError(f"the model's num_layers is {self.num_layers}", key="model")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads", key="model"
            )
        if self.head_dim % 2:
            raise ConfigError(f"a head of {self.head_dim} dimensions cannot be rotated", key="model")
        if self.torch_dtype not in DTYPES:
            raise ConfigError(
                f"weights stored as {self.torch_dtype} are not supported",
                key="model",
                remedy=f"use a checkpoint in one of {', '.join(DTYPES)}, or a GGUF file",
            )

    @property
    def num_weights(self) -> int:
        """Number of weights in the layers: the multiplications per token."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"the model's {name} is {value}", key="model")


class HfConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that are used, with the names of transformers 4 and 5."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    architectures: list[str] = []
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


def read_hf_config(document: bytes, stored_dtype: str, context_length: int | None = None) -> ModelConfig:
    """Read the bytes of a config.json. `context_length` limits the model's context."""
    architecture = _architecture(document)
    fields = decode_json(document, "config.json", HfConfig)
    _check_supported(fields)
    rope = fields.rope_parameters or fields.rope_scaling or {}
    scaling = read_rope_scaling(rope, fields.max_position_embeddings)
    own_context = scaled_context(fields.max_position_embeddings, scaling)
    window = _window(fields, architecture)
    head_dim = fields.head_dim
    if head_dim is None:
        default = fields.hidden_size // max(fields.num_attention_heads, 1)
        head_dim = _QWEN3_HEAD_DIM if architecture == QWEN3 else default
    check_hf_fields(document, rope, head_dim, fields.hidden_size)
    biased = fields.attention_bias and architecture in (LLAMA, QWEN3)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.vocab_size,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta") or fields.rope_theta or 10000.0),
        rope_scaling=scaling,
        context_length=choose_context(own_context, window, context_length),
        tie_embeddings=fields.tie_word_embeddings,
        qkv_bias=biased or architecture == QWEN2,
        o_bias=biased,
        mlp_bias=fields.mlp_bias and architecture == LLAMA,
        qk_norm=architecture == QWEN3,
        sliding_window=window,
        eos_token_ids=token_ids(fields.eos_token_id),
        bos_token_id=fields.bos_token_id,
        torch_dtype=(fields.dtype or fields.torch_dtype or stored_dtype).removeprefix("torch."),
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Normalise a config's token id, list of ids or None to a tuple without duplicates, in order."""
    ids = [value] if isinstance(value, int) else value or []
    return tuple(dict.fromkeys(ids))


def choose_context(model_context: int, window: int | None, requested: int | None) -> int:
    """The context length to serve. ConfigError if the model's is smaller, or if it needs a sliding window."""
    if requested is not None and not 1 <= requested <= model_context:
        raise ConfigError(
            f"a context of {requested} tokens is not possible: the model has {model_context}",
            key="context_length",
            remedy=f"set context_length to 1 to {model_context}",
        )
    chosen = model_context if requested is None else requested
    if window is not None and window < chosen:
        raise ConfigError(
            f"sliding window attention over {window} tokens is not supported, and the context is {chosen}",
            key="context_length",
            remedy=f"set context_length to {window} or less, where full attention is equivalent",
        )
    return chosen


def scaled_context(stated: int, scaling: RopeScaling | None) -> int:
    """The context length after rope scaling. Linear and yarn extend the stated one; llama3's is stated extended."""
    if isinstance(scaling, LinearRope):
        return int(stated * scaling.factor)
    if isinstance(scaling, YarnRope):
        return max(stated, int(scaling.original_context_length * scaling.factor))
    return stated


def _architecture(document: bytes) -> str:
    class Named(msgspec.Struct):
        architectures: list[str] = []

    names = decode_json(document, "config.json", Named).architectures
    if not names or names[0] not in ARCHITECTURES:
        raise unknown_architecture(names[0] if names else "none", ARCHITECTURES)
    return names[0]


def unknown_architecture(name: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"the model's architecture {name} is not supported",
        key="model",
        remedy=f"supported architectures: {', '.join(known)}",
    )


def _check_supported(fields: HfConfig) -> None:
    if fields.quantization_config is not None:
        method = fields.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantized ({method}), which is not supported",
            key="model",
            remedy="use its unquantized weights, or a GGUF file",
        )
    if fields.hidden_act != "silu":
        raise ConfigError(f"the activation {fields.hidden_act} is not supported", key="model")
    rope = fields.rope_parameters or fields.rope_scaling or {}
    if (fields.partial_rotary_factor or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("partial rotary embeddings are not supported", key="model")


def _window(fields: HfConfig, architecture: str) -> int | None:
    """The attention window; None if it is off. Mistral's is on by default, Qwen's only with `use_sliding_window`."""
    if fields.layer_types is not None and "sliding_attention" not in fields.layer_types:
        return None
    if architecture == MISTRAL:
        window = fields.sliding_window
        return _MISTRAL_WINDOW if window is msgspec.UNSET else window
    is_off = not fields.use_sliding_window or fields.max_window_layers >= fields.num_hidden_layers
    return None if is_off or fields.sliding_window is msgspec.UNSET else fields.sliding_window


def read_rope_scaling(fields: Mapping[str, Any], context_length: int) -> RopeScaling | None:
    """Read `rope_scaling` or `rope_parameters`. ConfigError for an unknown kind."""
    kind = fields.get("rope_type") or fields.get("type") or "default"
    original = fields.get("original_max_position_embeddings") or context_length
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearRope(float(fields["factor"]))
        if kind == "llama3":
            return Llama3Rope(
                factor=float(fields["factor"]),
                low_freq_factor=float(fields["low_freq_factor"]),
                high_freq_factor=float(fields["high_freq_factor"]),
                original_context_length=int(original),
            )
        if kind == "yarn":
            factor = float(fields.get("factor") or context_length / original)
            return YarnRope(
                factor=factor,
                original_context_length=int(original),
                attention_factor=_yarn_attention(fields, factor),
                beta_fast=float(fields.get("beta_fast") or 32.0),
                beta_slow=float(fields.get("beta_slow") or 1.0),
                truncate=bool(fields.get("truncate", True)),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the rope scaling {kind} cannot be read: {error!r}", key="model") from error
    raise ConfigError(
        f"the rope scaling {kind} is not supported",
        key="model",
        remedy="supported kinds: linear, llama3, yarn",
    )


def _yarn_attention(fields: Mapping[str, Any], factor: float) -> float:
    stated = fields.get("attention_factor")
    if stated is not None:
        return float(stated)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = fields.get("mscale"), fields.get("mscale_all_dim")
    return scale(float(over)) / scale(float(under)) if over and under else scale(1.0)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Rotation angle per position for each pair of dimensions, [head_dim / 2] in float32, and the factor of
    cosine and sine. Follows transformers operation by operation, so the results are bit-identical."""
    import torch

    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    powers = config.rope_theta**exponents
    frequencies = 1.0 / powers
    scaling = config.rope_scaling
    match scaling:
        case LinearRope():
            frequencies = frequencies / scaling.factor
        case RopeDivisors():
            frequencies = frequencies / torch.tensor(scaling.divisors, dtype=torch.float32)
        case Llama3Rope():
            frequencies = _llama3_frequencies(frequencies, scaling)
        case YarnRope():
            return _yarn_frequencies(powers, config, scaling), scaling.attention_factor
    return frequencies, 1.0


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    """Scale long wavelengths, keep short ones, and interpolate between."""
    import torch

    context, low, high = scaling.original_context_length, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > context / low, frequencies / scaling.factor, frequencies)
    smooth = (context / waves - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(waves < context / high) * ~(waves > context / low)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(powers: torch.Tensor, config: ModelConfig, scaling: YarnRope) -> torch.Tensor:
    """Keep the frequency of dimensions with many rotations within the context, scale those with few."""
    import torch

    dim, context = config.head_dim, scaling.original_context_length

    def dimension_of(rotations: float) -> float:
        """The dimension that makes this many rotations within the original context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
