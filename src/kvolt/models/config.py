"""ModelConfig: the shape of a model, and how its Hugging Face `config.json` is read.

Owns which architectures are known, what is refused by name, and how positions become rotation frequencies.
It must not know where files lie, nor the names of weights. GGUF metadata is read in `gguf_file`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.models.unsupported_fields import check_hf_fields

if TYPE_CHECKING:
    import torch

LLAMA = "LlamaForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
MISTRAL = "MistralForCausalLM"
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3)
DTYPES = ("float32", "float16", "bfloat16")

_MISTRAL_WINDOW = 4096  # transformers' default where Mistral's config.json does not say
_QWEN3_HEAD_DIM = 128
_MOST_LAYERS = 1024  # a damaged file is not to make us list the tensors of millions


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
    """Cosine and sine are multiplied by it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class RopeDivisors(msgspec.Struct, frozen=True, tag="divisors"):
    """Each frequency is divided by its own number: how a GGUF file says llama3."""

    divisors: tuple[float, ...]


RopeScaling = LinearRope | Llama3Rope | YarnRope | RopeDivisors


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that shapes a forward pass and its KV, whatever kind of file it came from."""

    architecture: str
    """As Hugging Face names it: one of ARCHITECTURES."""
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
    """As the model says. Never less than `context_length`, so full attention is always right."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str = "float32"
    """What the weights are stored as; float32 for quantized ones, which are dequantized to it."""

    def __post_init__(self) -> None:
        """The arithmetic of the shapes. ConfigError for what no attention could run."""
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
                remedy=f"take a checkpoint in one of {', '.join(DTYPES)}, or a GGUF file",
            )

    @property
    def num_weights(self) -> int:
        """Of the layers: what every token is multiplied with."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"the model's {name} is {value}", key="model")


class HfConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that matter, in the spelling of transformers 4 or 5."""

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
    """From the bytes of a config.json; `context_length` is the most that will be used of the model's."""
    architecture = _architecture(document)
    try:
        given = msgspec.json.decode(document, type=HfConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(f"config.json cannot be used: {error}", key="model") from error
    _refuse_foreign(given)
    rope = given.rope_parameters or given.rope_scaling or {}
    scaling = read_rope_scaling(rope, given.max_position_embeddings)
    own_context = scaled_context(given.max_position_embeddings, scaling)
    window = _window(given, architecture)
    head_dim = given.head_dim
    if head_dim is None:
        default = given.hidden_size // max(given.num_attention_heads, 1)
        head_dim = _QWEN3_HEAD_DIM if architecture == QWEN3 else default
    check_hf_fields(document, rope, head_dim, given.hidden_size)
    biased = given.attention_bias and architecture in (LLAMA, QWEN3)
    return ModelConfig(
        architecture=architecture,
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        num_layers=given.num_hidden_layers,
        num_heads=given.num_attention_heads,
        num_kv_heads=given.num_key_value_heads or given.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=given.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta") or given.rope_theta or 10000.0),
        rope_scaling=scaling,
        context_length=choose_context(own_context, window, context_length),
        tie_embeddings=given.tie_word_embeddings,
        qkv_bias=biased or architecture == QWEN2,
        o_bias=biased,
        mlp_bias=given.mlp_bias and architecture == LLAMA,
        qk_norm=architecture == QWEN3,
        sliding_window=window,
        eos_token_ids=token_ids(given.eos_token_id),
        bos_token_id=given.bos_token_id,
        torch_dtype=(given.dtype or given.torch_dtype or stored_dtype).removeprefix("torch."),
    )


def token_ids(given: int | list[int] | None) -> tuple[int, ...]:
    """An end-of-text id as configs give it: one, several or none; each once, in their order."""
    several = [given] if isinstance(given, int) else given or []
    return tuple(dict.fromkeys(several))


def choose_context(own: int, window: int | None, wanted: int | None) -> int:
    """The context length to serve. ConfigError where the model has less, or would need a sliding window."""
    if wanted is not None and not 1 <= wanted <= own:
        raise ConfigError(
            f"a context of {wanted} tokens is not possible: the model has {own}",
            key="context_length",
            remedy=f"ask for 1 to {own}",
        )
    chosen = own if wanted is None else wanted
    if window is not None and window < chosen:
        raise ConfigError(
            f"attention in a sliding window of {window} tokens is not supported, and the context is {chosen}",
            key="context_length",
            remedy=f"set context_length to {window} or less: up to there full attention is the same",
        )
    return chosen


def scaled_context(stated: int, scaling: RopeScaling | None) -> int:
    """Linear and yarn stretch the context that is stated; llama3's is stated as stretched."""
    if isinstance(scaling, LinearRope):
        return int(stated * scaling.factor)
    if isinstance(scaling, YarnRope):
        return max(stated, int(scaling.original_context_length * scaling.factor))
    return stated


def _architecture(document: bytes) -> str:
    class Named(msgspec.Struct):
        architectures: list[str] = []

    try:
        names = msgspec.json.decode(document, type=Named).architectures
    except msgspec.DecodeError as error:
        raise ConfigError(f"config.json cannot be used: {error}", key="model") from error
    if not names or names[0] not in ARCHITECTURES:
        raise unknown_architecture(names[0] if names else "none", ARCHITECTURES)
    return names[0]


def unknown_architecture(name: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"the model's architecture is {name}, which is not known",
        key="model",
        remedy=f"known are {', '.join(known)}",
    )


def _refuse_foreign(given: HfConfig) -> None:
    if given.quantization_config is not None:
        method = given.quantization_config.get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantized ({method}), which is not supported",
            key="model",
            remedy="take its unquantized weights, or a GGUF file",
        )
    if given.hidden_act != "silu":
        raise ConfigError(f"the activation {given.hidden_act} is not supported", key="model")
    rope = given.rope_parameters or given.rope_scaling or {}
    if (given.partial_rotary_factor or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("rotating only a part of each head is not supported", key="model")


def _window(given: HfConfig, architecture: str) -> int | None:
    """Only Mistral has a window without being asked; Qwen names one that is off unless switched on."""
    if given.layer_types is not None and "sliding_attention" not in given.layer_types:
        return None
    if architecture == MISTRAL:
        window = given.sliding_window
        return _MISTRAL_WINDOW if window is msgspec.UNSET else window
    switched_off = not given.use_sliding_window or given.max_window_layers >= given.num_hidden_layers
    return None if switched_off or given.sliding_window is msgspec.UNSET else given.sliding_window


def read_rope_scaling(given: Mapping[str, Any], context_length: int) -> RopeScaling | None:
    """From `rope_scaling` or `rope_parameters`. ConfigError for a kind that is not known."""
    kind = given.get("rope_type") or given.get("type") or "default"
    original = given.get("original_max_position_embeddings") or context_length
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearRope(float(given["factor"]))
        if kind == "llama3":
            return Llama3Rope(
                factor=float(given["factor"]),
                low_freq_factor=float(given["low_freq_factor"]),
                high_freq_factor=float(given["high_freq_factor"]),
                original_context_length=int(original),
            )
        if kind == "yarn":
            factor = float(given.get("factor") or context_length / original)
            return YarnRope(
                factor=factor,
                original_context_length=int(original),
                attention_factor=_yarn_attention(given, factor),
                beta_fast=float(given.get("beta_fast") or 32.0),
                beta_slow=float(given.get("beta_slow") or 1.0),
                truncate=bool(given.get("truncate", True)),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the rope scaling {kind} cannot be read: {error!r}", key="model") from error
    raise ConfigError(
        f"the rope scaling {kind} is not supported", key="model", remedy="known are linear, llama3 and yarn"
    )


def _yarn_attention(given: Mapping[str, Any], factor: float) -> float:
    stated = given.get("attention_factor")
    if stated is not None:
        return float(stated)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = given.get("mscale"), given.get("mscale_all_dim")
    return scale(float(over)) / scale(float(under)) if over and under else scale(1.0)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair of dimensions, [head_dim / 2] in float32, and what cosine and
    sine are multiplied by. Step by step as transformers computes it, so that no bit differs."""
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
    """Long waves are stretched, short ones are not, and those between are blended."""
    import torch

    context, low, high = scaling.original_context_length, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > context / low, frequencies / scaling.factor, frequencies)
    smooth = (context / waves - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(waves < context / high) * ~(waves > context / low)
    return torch.where(between, blended, stretched)


def _yarn_frequencies(powers: torch.Tensor, config: ModelConfig, scaling: YarnRope) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn seldom are stretched."""
    import torch

    dim, context = config.head_dim, scaling.original_context_length

    def turning(rotations: float) -> float:
        """The dimension whose wave turns so often within the original context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept
