from __future__ import annotations

from kvolt import SamplingParams
from kvolt.core.request import Sampling


def test_every_sampling_field_is_a_parameter() -> None:
    fields = {"n" if name == "num_choices" else name for name in Sampling.__struct_fields__}
    assert fields <= {*SamplingParams.__struct_fields__}
