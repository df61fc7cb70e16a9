"""Generation defaults of a model: generation_config.json of a folder, `general.sampling.*` of a GGUF file.

They are sampling parameters by their names in `Sampling`, and `max_tokens`. A request overrides each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import ConfigError

GenerationDefaults = dict[str, float | int]

FILE = "generation_config.json"
_GGUF_PREFIX = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


_TokenId = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]


class GenerationConfig(msgspec.Struct, frozen=True):
    """The fields of generation_config.json that are used.

    Sampling parameters have the ranges of requests: an engine would refuse all requests that leave others to the model.
    """

    eos_token_id: _TokenId | list[_TokenId] | None = None
    bos_token_id: _TokenId | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None

    @property
    def defaults(self) -> GenerationDefaults:
        """The defaults of the file. `do_sample: false` says that the sampling parameters are not in use."""
        values: dict[str, float | int | None] = {
            "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_new_tokens,
        }
        if self.do_sample is not False:
            values |= {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k if self.top_k and self.top_k > 0 else None,  # 0 and -1: no limit
                "min_p": self.min_p,
            }
        return {name: value for name, value in values.items() if value is not None}


def read_gguf_defaults(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Defaults of a GGUF file. ConfigError for a value out of range."""
    stored = {name: metadata.get(_GGUF_PREFIX + key) for key, name in _GGUF_NAMES.items()}
    # GGUF has float32: 0.9 is stored as 0.8999999762.
    values = {name: round(each, 6) if isinstance(each, float) else each for name, each in stored.items()}
    try:
        return msgspec.convert(values, GenerationConfig).defaults
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the GGUF metadata {_GGUF_PREFIX}* cannot be used: {error}", key="model"
        ) from error
