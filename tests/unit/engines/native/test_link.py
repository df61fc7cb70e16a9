"""Link: calls that fail before they are sent."""

from __future__ import annotations

import pytest

from kvolt.engines.native.shell.link import EngineLink
from kvolt.engines.native.shell.messages import EMBED


async def test_a_call_that_cannot_be_encoded_leaves_nothing_waiting() -> None:
    link = EngineLink(lambda answer: None, lambda: None)
    with pytest.raises(OverflowError):
        await link.call(EMBED, [[2**70]], "mean")
    assert not link._calls
