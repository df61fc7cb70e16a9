"""LoRA adapters: loaded from PEFT folders and selected per request.

An adapter adds `scale * (x A^T) B^T` to a product. Rows of one request are adjacent in a batch, so each adapter of a
step adds two small products per joined weight. Owns loading and applying adapters; the Batch says which rows use
which adapter, and block keys contain the adapter's digest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from kvolt.core.errors import ConfigError, NotFound
from kvolt.engines.native.parallel import RankGroup, share
from kvolt.models.config import ModelConfig

Place = Literal["qkv", "out", "gate_up", "down"]

_MEMBERS: dict[Place, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_PLACE_OF = {member: place for place, members in _MEMBERS.items() for member in members}
_NAME = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
_MAX_ADAPTERS = 64


class _PeftConfig(msgspec.Struct):
    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(slots=True)
class _Delta:
    """One member of a joined weight: rows `start` to `start + B.shape[0]` of the product."""

    start: int
    down: Tensor
    up: Tensor


@dataclass(slots=True)
class Adapter:
    name: str
    digest: str
    """Hash of its weights and name, part of its block keys, so that blocks of different adapters are never
    confused. Routers know adapters by name only: blocks left in the cache by an unloaded adapter are reported
    under the same hashes as those of its successor with the same name, until they are evicted."""
    deltas: dict[tuple[int, Place], list[_Delta]] = field(default_factory=dict)


class Adapters:
    """The loaded adapters of one rank."""

    def __init__(
        self, config: ModelConfig, group: RankGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._group = group
        self._dtype = dtype
        self._device = device
        self._loaded: dict[str, Adapter] = {}
        self.on_load: Callable[[str, Path], None] = lambda name, folder: None
        """Called after an adapter was loaded; forwards it to the other ranks."""
        self.on_unload: Callable[[str], None] = lambda name: None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def digest(self, name: str) -> str:
        return self._find(name).digest

    def load(self, name: str, folder: Path) -> Adapter:
        """Load an adapter. ConfigError if it does not fit the model, or if another one with that name is loaded."""
        if len(self._loaded) >= _MAX_ADAPTERS and name not in self._loaded:
            raise ConfigError(f"{_MAX_ADAPTERS} adapters are loaded", key="lora", remedy="unload one of them")
        config, tensors, digest = _read(name, folder)
        if name in self._loaded:
            if self._loaded[name].digest == digest:
                return self._loaded[name]
            raise ConfigError(
                f"an adapter {name!r} with other weights is loaded", key="lora", remedy="unload it first"
            )
        scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
        pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
        for full_name, tensor in tensors.items():
            match = _NAME.fullmatch(full_name)
            if match is None or match[2] not in _PLACE_OF:
                raise ConfigError(
                    f"{folder}: the adapter changes {full_name}, which is not supported", key="lora"
                )
            if tensor.dim() != 2 or tensor.shape["AB".index(match[3])] != config.r:
                raise ConfigError(
                    f"{folder}: {full_name} has the shape {list(tensor.shape)}, which does not match rank {config.r}",
                    key="lora",
                    remedy="set r in adapter_config.json to the rank of the weights",
                )
            pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
        adapter = Adapter(name, digest)
        for (layer, member), pair in sorted(pairs.items()):
            self._add_pair(adapter, layer, member, pair, scale, folder)
        self._loaded[name] = adapter
        self.on_load(name, folder)
        return adapter

    def unload(self, name: str) -> None:
        self._find(name)
        del self._loaded[name]
        self.on_unload(name)

    def add(
        self, rows: Sequence[tuple[str, int, int]], layer: int, place: Place, x: Tensor, product: Tensor
    ) -> None:
        """Add each request's adapter to its rows of a product, in place."""
        for name, first, last in rows:
            for delta in self._loaded[name].deltas.get((layer, place), ()):
                change = (x[first:last] @ delta.down.T) @ delta.up.T
                product[first:last, delta.start : delta.start + delta.up.shape[0]] += change

    # ---

    def _find(self, name: str) -> Adapter:
        try:
            return self._loaded[name]
        except KeyError:
            known = ", ".join(self._loaded) or "none"
            raise NotFound(
                f"no adapter {name!r} is loaded (loaded: {known})", kind="lora", name=name
            ) from None

    def _sizes(self, member: str) -> tuple[int, int]:
        """Input and output size of the whole weight."""
        config = self._config
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        return {
            "q_proj": (hidden, heads),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (heads, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }[member]

    def _add_pair(
        self, adapter: Adapter, layer: int, member: str, pair: dict[str, Tensor], scale: float, folder: Path
    ) -> None:
        size_in, size_out = self._sizes(member)
        down, up = pair.get("A"), pair.get("B")
        if down is None or up is None or layer >= self._config.num_layers:
            raise ConfigError(f"{folder}: the adapter is incomplete at layer {layer}, {member}", key="lora")
        if down.shape[1] != size_in or up.shape[0] != size_out:
            raise ConfigError(
                f"{folder}: layer {layer}, {member} has shapes {tuple(down.shape)} and {tuple(up.shape)}, "
                f"which do not fit a weight of {size_out} x {size_in}",
                key="lora",
                remedy="use an adapter that was trained on this model",
            )
        place = _PLACE_OF[member]
        group = self._group
        if place in ("qkv", "gate_up"):  # split by output: all of A, this rank's part of B
            up = share(up, 0, group.rank, group.degree)
        else:  # split by input: the partial sums of the ranks are added
            down = share(down, 1, group.rank, group.degree)
        start = 0
        for other in _MEMBERS[place]:
            if other == member:
                break
            start += self._sizes(other)[1] // group.degree
        moved = [
            x.to(device=self._device, dtype=self._dtype).contiguous() for x in (down, up.float() * scale)
        ]
        adapter.deltas.setdefault((layer, place), []).append(_Delta(start, moved[0], moved[1]))


def _read(name: str, folder: Path) -> tuple[_PeftConfig, dict[str, Tensor], str]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=_PeftConfig)
        data = (folder / "adapter_model.safetensors").read_bytes()
        tensors: dict[str, Any] = load(data)
    except OSError as error:
        raise ConfigError(
            f"{folder} is not an adapter: {error.strerror or error}",
            key="lora",
            remedy="use a folder with adapter_config.json and adapter_model.safetensors",
        ) from error
    except (msgspec.DecodeError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be read as an adapter: {error}", key="lora") from error
    unsupported = {
        "peft_type": config.peft_type != "LORA",
        "use_dora": config.use_dora,
        "bias": config.bias != "none",
        "fan_in_fan_out": config.fan_in_fan_out,
        "modules_to_save": bool(config.modules_to_save),
        "rank_pattern": bool(config.rank_pattern),
        "alpha_pattern": bool(config.alpha_pattern),
    }
    for option, is_used in unsupported.items():
        if is_used:
            raise ConfigError(f"{folder}: adapters with {option} are not supported", key="lora")
    if config.r < 1:
        raise ConfigError(f"{folder}: the adapter's rank is {config.r}", key="lora")
    header = msgspec.json.encode((name, config))
    return config, tensors, hashlib.blake2b(header + data, digest_size=16).hexdigest()
