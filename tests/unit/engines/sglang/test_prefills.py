"""Prompts for others: both sides are told the same room, by a ticket that one gives and the other takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.engines.sglang.lab import FACTS, LENGTH, request, row, started

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Role, Sampling
from kvolt.engines.sglang.host.messages import Abort
from kvolt.engines.sglang.prefills import MAX_TICKET_BYTES

PREFILL_FACTS = replace(FACTS, bootstrap_port=8998)
MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


async def test_both_sides_meet_in_the_same_rooms(tmp_path: Path) -> None:
    asked = request(sampling=Sampling(seed=1, num_choices=2))
    async with started(
        tmp_path / "p", PREFILL_FACTS, role=Role.PREFILL, bootstrap_host="10.0.0.1"
    ) as prefill:
        handoff = await prefill.engine.prefill(asked)
        assert handoff.first_tokens is None, "decode tells them"
        given = [[each.fields[name] for name in MEETING] for each in prefill.host.asked]
        async with started(tmp_path / "d", role=Role.DECODE) as decode:
            decode.engine.submit(replace(asked, handoff=handoff))
            taken = [[each.fields[name] for name in MEETING] for each in decode.host.asked]
    assert given == taken
    assert [each[:2] for each in given] == [["10.0.0.1", 8998]] * 2
    assert given[0][2] != given[1][2]


async def test_prefill_rank_is_in_the_ticket(tmp_path: Path) -> None:
    facts = replace(PREFILL_FACTS, num_ranks=4)
    async with started(tmp_path / "p", facts, role=Role.PREFILL) as prefill:
        handoff = await prefill.engine.prefill(request())
        rank = prefill.host.asked[0].fields["routed_dp_rank"]
        assert rank in range(4)
        async with started(tmp_path / "d", role=Role.DECODE) as decode:
            decode.engine.submit(request(handoff=handoff))
            assert decode.host.asked[0].fields["disagg_prefill_dp_rank"] == rank


async def test_unused_prompt_is_aborted(tmp_path: Path) -> None:
    async with started(tmp_path, PREFILL_FACTS, role=Role.PREFILL) as lab:
        await lab.engine.prefill(request("given-up"))
        with pytest.raises(InvalidRequest):
            await lab.engine.prefill(request("given-up"))
        await lab.engine.release_prefill(RequestId("given-up"))
        assert lab.host.commands[-1] == Abort(lab.host.asked[0].rid)
        await lab.engine.prefill(request("given-up"))


async def test_one_that_was_taken_is_over(tmp_path: Path) -> None:
    async with started(tmp_path, PREFILL_FACTS, role=Role.PREFILL) as lab:
        await lab.engine.prefill(request())
        lab.host.rows(row(lab.host.asked[0].rid, 5, finish=LENGTH))
        step = await lab.step()
        assert not step.deltas, "the other side tells it"
        await lab.engine.release_prefill(RequestId("r"))
        assert not any(isinstance(each, Abort) for each in lab.host.commands)


async def test_what_a_decode_worker_refuses(tmp_path: Path) -> None:
    async with started(tmp_path / "p", PREFILL_FACTS, role=Role.PREFILL) as prefill:
        handoff = await prefill.engine.prefill(request())
        with pytest.raises(Unsupported):
            prefill.engine.submit(request())
    async with started(tmp_path / "d", role=Role.DECODE) as decode:
        engine = decode.engine
        for refused in (
            request(),
            request(handoff=replace(handoff, first_tokens=(5,))),
            request(handoff=handoff, sampling=Sampling(temperature=0.0, prompt_logprobs=1)),
        ):
            with pytest.raises(Unsupported):
                engine.submit(refused)
        for ticket in (b"", b"\xc1", b"\x93\x01\x02\x03", handoff.ticket[:-1], b"0" * (MAX_TICKET_BYTES + 1)):
            with pytest.raises(InvalidRequest):
                engine.submit(request(handoff=replace(handoff, ticket=ticket)))
        with pytest.raises(InvalidRequest):
            engine.submit(request(handoff=handoff, sampling=Sampling(seed=1, num_choices=2)))
        with pytest.raises(Unsupported):
            await engine.prefill(request())
        assert not decode.host.asked
