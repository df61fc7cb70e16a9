from __future__ import annotations

from typing import Any

import pytest

from kvolt import SamplingParams
from kvolt.core.request import Sampling


def test_every_sampling_field_is_a_parameter() -> None:
    fields = {"n" if name == "num_choices" else name for name in Sampling.__struct_fields__}
    assert fields <= {*SamplingParams.__struct_fields__}


def test_an_unknown_parameter_suggests_the_nearest() -> None:
    wrong: dict[str, Any] = {"max_tokns": 3}
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'max_tokns'; did you mean max_tokens\?"
    ):
        SamplingParams(**wrong)
