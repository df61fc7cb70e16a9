"""A prompt whose answers end soon: looked for, since what a random model says is not the same on every machine."""

from __future__ import annotations

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.testing.engines.harness import Run


async def prompt_that_ends(run: Run) -> tuple[int, ...]:
    """With two choices, of which one ends before the other."""
    for start in range(3, 200):
        asked = Request(
            request_id=RequestId(f"r{start}"),
            model=run.info.model,
            token_ids=tuple(range(start, start + 6)),
            stop=StopConditions(max_tokens=60),
            sampling=Sampling(seed=1, num_choices=2),
        )
        answer = await run.answer(asked)
        lengths = sorted(map(len, answer.tokens.values()))
        if 3 <= lengths[0] < lengths[1] < 30:
            return asked.token_ids
    raise AssertionError("no prompt ends shortly")
