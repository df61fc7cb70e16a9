"""What is for another engine is refused by name."""

from __future__ import annotations

import pytest

from kvolt.core.errors import Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.engines.external.requests import refuse_extra


def asked(**extra: object) -> Request:
    stop = StopConditions(max_tokens=1)
    return Request(request_id=RequestId("r"), model="m", token_ids=(1,), stop=stop, extra=extra)


def test_what_is_not_known_is_refused() -> None:
    refuse_extra(asked(), "X")
    refuse_extra(asked(a=1), "X", ("a", "b"))
    with pytest.raises(Unsupported, match="X does not support 'c'") as caught:
        refuse_extra(asked(a=1, c=2), "X", ("a", "b"))
    assert (caught.value.fields["feature"], caught.value.fields["param"]) == ("c", "c")
