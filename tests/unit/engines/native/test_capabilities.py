"""What the engine offers besides answers: embeddings, its blocks, prompts for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.unit.engines.native.equality_lab import (
    Drive,
    Reference,
    Watch,
    answer,
    answers,
    ask,
    assert_at_rest,
    core_of,
    make_prompts,
)

from kvolt.core.errors import ErrorInfo, InvalidRequest, Overloaded
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared, Removed, Stored
from kvolt.core.request import Grammar, GrammarKind, Handoff, Request, Role
from kvolt.engines.contract import EngineSpec, HeldKv, Pooling
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import CoreHooks, build_core
from kvolt.engines.prefills import HOLD_S
from kvolt.engines.sim.model import EOS
from kvolt.models.checkpoint import open_checkpoint
from kvolt.scheduler.sequence import TokenNaming
from kvolt.testing.tiny_models import tiny_checkpoint

PROMPTS = make_prompts(seed=9, vocabulary=900, count=6, longest=80)
PROMPT = PROMPTS["p4"]
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("capabilities") / "model", seed=6)


@pytest.fixture
def core(folder: Path) -> EngineCore:
    return core_of(folder, max_batch_tokens=64)


# --- Embeddings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_pooled_hidden_states_of_transformers(
    folder: Path, core: EngineCore, pooling: Pooling
) -> None:
    model = Reference.of_folder(folder).model
    found = core.capabilities.embed(list(PROMPTS.values()), pooling)
    assert max(map(len, PROMPTS.values())) > core.scheduler.limits.max_batch_tokens
    for tokens, vector in zip(PROMPTS.values(), found, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        pooled = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
        assert vector == pytest.approx((pooled / pooled.norm()).tolist(), abs=1e-4)
    assert_at_rest(core)


def test_an_embedding_does_not_disturb_what_runs(core: EngineCore) -> None:
    expected = answer(core, ask("a", PROMPT, 10)).tokens
    core.capabilities.clear_kv()
    drive = Drive(core, [ask("a", PROMPT, 10)])
    while core.has_work:
        drive.step()
        core.capabilities.embed([PROMPTS["p5"]])
    assert drive.finish()["a"].tokens == expected


@pytest.mark.parametrize(
    "tokens", [(), range(3, 600), (3, 10**6), (-1, 3)], ids=["none", "long", "high", "low"]
)
def test_inputs_that_cannot_be_embedded_are_refused(core: EngineCore, tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="input 1"):
        core.capabilities.embed([PROMPT, tuple(tokens)])
    assert_at_rest(core)


# --- Blocks ---------------------------------------------------------------------------------------------


def test_what_is_held_can_be_seen_and_cleared(core: EngineCore) -> None:
    request = ask("a", PROMPT, 4)
    assert core.capabilities.match(request) == 0
    answer(core, request)
    full = len(PROMPT) // BLOCK * BLOCK
    assert full > 0
    assert core.capabilities.match(request) == full
    assert core.capabilities.match(ask("b", PROMPT, 4, request={"salt": "other"})) == 0
    stored = core.capabilities.kv_contents()
    num_blocks = sum(len(run.sequence_hashes) for run in stored)
    assert num_blocks == (len(PROMPT) + 3) // BLOCK
    assert core.capabilities.clear_kv() == num_blocks
    assert core.capabilities.match(request) == 0
    assert core.capabilities.kv_contents() == ()


def test_changes_of_all_steps_add_up_to_the_contents(folder: Path) -> None:
    core = core_of(folder, kv_blocks=14)
    drive = Drive(core, [ask(name, prompt, 20) for name, prompt in PROMPTS.items()])
    seen: set[int] = set()
    num_removed = 0
    while core.has_work:
        output = drive.step()
        for change in output.kv_changes if output is not None else ():
            match change:
                case Stored():
                    assert change.parent is None or change.parent in seen
                    fresh = set(change.sequence_hashes)
                    assert not fresh & seen
                    seen |= fresh
                case Removed():
                    assert seen.issuperset(change.sequence_hashes)
                    seen -= set(change.sequence_hashes)
                    num_removed += len(change.sequence_hashes)
                case Cleared():
                    seen.clear()
        held = {each for run in core.capabilities.kv_contents() for each in run.sequence_hashes}
        assert seen == held
    assert num_removed > 0
    assert len(seen) > 0


def carry(core: EngineCore, other: EngineCore, request: Request) -> int:
    """Copy the blocks of a prompt from one core to another; the number of blocks."""
    naming = TokenNaming(request, core.keys_of(request))
    naming.reach(list(request.token_ids), len(request.token_ids) // BLOCK)
    keys, hashes = naming.names.keys, naming.names.sequence_hashes
    allocation = other.capabilities.allocate_kv(keys, hashes)
    for key, block in zip(keys[allocation.num_present :], allocation.blocks, strict=True):
        source = core.scheduler.pool.block_of(key)
        assert source is not None
        other.runner.slab.write(block, core.runner.slab.read(source))
    other.capabilities.commit_kv(allocation, len(allocation.blocks))
    return len(keys)


def test_blocks_travel_to_another_core_and_mean_the_same_there(folder: Path, core: EngineCore) -> None:
    expected = answers(core, *(ask(name, prompt, 8) for name, prompt in PROMPTS.items()))
    other = core_of(folder)
    assert other.capabilities.kv_layout() == core.capabilities.kv_layout()
    for name, prompt in PROMPTS.items():
        request = ask(name, prompt, 8)
        assert carry(core, other, request) == len(prompt) // BLOCK
        found = answer(other, request)
        assert found.cached == (len(prompt) - 1) // BLOCK * BLOCK
        assert found.tokens == expected[name].tokens
    assert_at_rest(other)


# --- Prompts for others ---------------------------------------------------------------------------------


def prefilled(core: EngineCore, request: Request) -> Handoff:
    found: list[Handoff | ErrorInfo] = []
    core.capabilities.prefill(request, found.append)
    drive = Drive(core)
    while not found:
        drive.step()
    assert not drive.choices, "what prefill sampled was told as an answer"
    assert isinstance(found[0], Handoff), found[0]
    return found[0]


@pytest.mark.parametrize("num_choices", [1, 3])
def test_another_core_goes_on_where_prefill_ended(folder: Path, core: EngineCore, num_choices: int) -> None:
    asked = ask("a", PROMPT, 8, num_choices=num_choices, temperature=0.8, seed=3)
    whole = Drive(core_of(folder), [asked])
    whole.finish()
    handoff = prefilled(core, asked)
    assert handoff.first_tokens is not None
    assert len(handoff.block_hashes) == len(PROMPT) // BLOCK
    core.scheduler.check_integrity()
    assert core.scheduler.pool.num_used == -(-len(PROMPT) // BLOCK), "the prompt is not held"
    other = core_of(folder)
    num_blocks = carry(core, other, asked)
    core.capabilities.release_prefill(asked.request_id)
    assert_at_rest(core)
    rest = Drive(other, [replace(asked, handoff=handoff)])
    assert rest.finish()["a"].cached == num_blocks * BLOCK
    for index in range(num_choices):
        tokens = [handoff.first_tokens[index], *rest.choices["a", index].tokens]
        assert tokens == whole.choices["a", index].tokens


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 1},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"logit_bias": {EOS: 100.0}, "stop": {"ignore_eos": False}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_token_that_decode_has_to_tell_is_left_to_it(
    folder: Path, core: EngineCore, asked: dict[str, Any]
) -> None:
    request = ask("a", PROMPT, **({"max_tokens": 5} | asked))
    handoff = prefilled(core, request)
    assert handoff.first_tokens is None
    other = core_of(folder)
    assert answer(other, replace(request, handoff=handoff)).tokens == answer(other, request).tokens
    core.capabilities.release_prefill(request.request_id)
    assert_at_rest(core)


def test_a_hold_ends_when_its_time_is_over(folder: Path) -> None:
    watch = Watch()
    spec = EngineSpec(model=str(folder), role=Role.PREFILL)
    arguments = NativeArguments(dtype="float32", kv_blocks=64, context_length=256)
    core = build_core(spec, "m", open_checkpoint(folder, 256), arguments, CoreHooks(clock=watch))
    prefilled(core, ask("a", PROMPT, 5))
    assert core.capabilities.prefills.next_expiry == watch.time + HOLD_S
    watch.time += HOLD_S - 0.1
    core.step()
    assert core.scheduler.pool.num_used > 0
    watch.time += 0.2
    core.step()
    assert core.capabilities.prefills.next_expiry is None
    assert_at_rest(core)


def test_a_prefill_can_be_given_up_at_any_step(core: EngineCore) -> None:
    """In chunks of 64 tokens: before, between and after them."""
    long = tuple(range(3, 203))
    for num_steps in range(6):
        found: list[Handoff | ErrorInfo] = []
        core.capabilities.clear_kv()
        core.capabilities.prefill(ask("a", long, 5), found.append)
        for _ in range(num_steps):
            core.step()
        assert bool(found) == (num_steps >= 4)
        core.capabilities.release_prefill(RequestId("a"))
        core.capabilities.release_prefill(RequestId("a"))
        assert_at_rest(core)


def test_the_blocks_of_a_prompt_are_reported_as_they_are_written(core: EngineCore) -> None:
    """In chunks of 64 tokens, and first what is cached of it."""
    long = tuple(range(3, 203))
    answer(core, ask("before", long[:33], 2))
    core.capabilities.prefill(ask("a", long, 5), lambda found: None)
    slab, name = core.runner.slab, RequestId("a")
    seen: list[tuple[HeldKv, list[bytes]]] = []

    def note(found: HeldKv | ErrorInfo) -> None:
        assert isinstance(found, HeldKv)
        seen.append((found, [slab.read(block) for block in found.blocks]))
        if len(found.blocks) < len(long) // BLOCK:
            core.capabilities.computed_kv(name, len(found.blocks), note)

    core.capabilities.computed_kv(name, 0, note)
    while core.has_work:
        core.step()
    held = core.capabilities.held_kv(name)
    assert [len(part.blocks) for part, _ in seen] == [2, 6, 10, 12]
    for part, data in seen:
        assert part.blocks == held.blocks[: len(part.blocks)]
        assert data == [slab.read(block) for block in part.blocks], "told before it was written"
    core.capabilities.release_prefill(name)
    assert_at_rest(core)


def test_a_failed_prefill_is_reported_to_its_caller(core: EngineCore) -> None:
    with pytest.raises(InvalidRequest):
        core.capabilities.prefill(ask("a", PROMPT, 10**6), lambda found: None)
    found: list[Handoff | ErrorInfo] = []
    wrong = {"grammar": Grammar(GrammarKind.CHOICE, "{")}
    core.capabilities.prefill(ask("a", PROMPT, 5, request=wrong, num_choices=2), found.append)
    impossible: dict[str, Any] = {"allowed_token_ids": (EOS,), "stop": {"min_tokens": 2, "ignore_eos": False}}
    core.capabilities.prefill(ask("b", PROMPT, 5, num_choices=2, **impossible), found.append)
    drive = Drive(core)
    drive.finish()
    assert [type(one) for one in found] == [ErrorInfo, ErrorInfo]
    assert not drive.failed


def test_blocks_held_for_others_leave_no_room_for_an_embedding(folder: Path) -> None:
    core = core_of(folder, kv_blocks=-(-len(PROMPT) // BLOCK) + 1)
    prefilled(core, ask("a", PROMPT, 2))
    with pytest.raises(Overloaded):
        core.capabilities.embed([PROMPTS["p5"]])
    core.capabilities.release_prefill(RequestId("a"))
    assert len(core.capabilities.embed([PROMPTS["p5"]])) == 1
    assert_at_rest(core)
