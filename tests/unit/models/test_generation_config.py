"""Generation defaults of model files have the ranges of requests."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import ConfigError
from kvolt.frontend.openai_api.requests import CompletionRequest
from kvolt.models.generation_config import GenerationConfig, read_gguf_defaults


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_default_has_the_range_of_a_request(name: str) -> None:
    """A request that leaves the value to the model would fail otherwise."""

    def range_of(kind: type[Any]) -> object:
        schema = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"][name]["anyOf"][0]
        return {key: value for key, value in schema.items() if key != "description"}

    assert range_of(GenerationConfig) == range_of(CompletionRequest)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e38, "hot", True, [1.0], {}])
def test_a_wrong_temperature_of_a_gguf_file_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        read_gguf_defaults({"general.sampling.temp": value})
