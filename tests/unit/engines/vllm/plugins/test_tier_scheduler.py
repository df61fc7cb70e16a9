"""The half beside vLLM's scheduler: what is brought, what goes down, and whose blocks are waited for."""

from __future__ import annotations

from types import SimpleNamespace

from tests.unit.engines.vllm.plugins.tier_lab import BLOCK, FakeRequest, plan, tier_messages, tier_scheduler

from kvolt.core.kv_events import Tier
from kvolt.core.load import StepStats
from kvolt.engines.vllm.plugins.tier_onboard_policy import TierOnboardPolicy
from kvolt.engines.vllm.plugins.tier_stats import VllmTierMetrics

HOST, DISK = Tier.HOST, Tier.DISK
TierUpdate, TierCounters = tier_messages.TierUpdate, tier_messages.TierCounters


class Lab:
    def __init__(self) -> None:
        self.worth = TierOnboardPolicy(BLOCK, 64)
        self.scheduler = tier_scheduler.TierScheduler(BLOCK, 1, b"model", self.worth)

    def stored(self, request: FakeRequest, tier: Tier, *indexes: int) -> None:
        names = [request.block_hashes[index] for index in indexes]
        numbers = [tier_messages.hash_of(tier_messages.key_of(name, b"model")) for name in names]
        self.scheduler.apply_update(TierUpdate(stored={(tier, number): 1 for number in numbers}))

    def is_slow(self, block_s: float) -> None:
        for tokens in range(10, 30):
            self.worth.times.add(
                StepStats(prefill_tokens=tokens, prefill_context=tokens**2, time_s=tokens / 1e3)
            )
        self.scheduler.apply_update(TierUpdate(counters={HOST: TierCounters(block_s=block_s)}))


def request(name: str = "r", count: int = 13) -> FakeRequest:
    return FakeRequest(name, list(range(count)))


def test_blocks_in_any_tier_are_loaded_in_order() -> None:
    lab, asked = Lab(), request()
    lab.stored(asked, HOST, 0, 2)
    assert lab.scheduler.find_offloaded(asked, 0) == BLOCK
    lab.stored(asked, DISK, 1)
    assert lab.scheduler.find_offloaded(asked, 0) == 3 * BLOCK
    assert lab.scheduler.find_offloaded(asked, BLOCK) == 2 * BLOCK
    lab.scheduler.on_allocated(asked, [10, 11, 12], 2 * BLOCK)
    assert lab.scheduler.tiers_of_load("r") == {DISK: 1, HOST: 1}
    loads = lab.scheduler.build_commands(plan()).loads["r"]
    assert [(move.position, move.number) for move in loads] == [(1, 11), (2, 12)]
    assert lab.scheduler.num_onboarded == 2


def test_the_last_token_of_a_prompt_is_computed() -> None:
    lab, asked = Lab(), request(count=8)
    lab.stored(asked, HOST, 0, 1)
    assert lab.scheduler.find_offloaded(asked, 0) == BLOCK


def test_prompts_with_an_adapter_are_left_out() -> None:
    lab, asked = Lab(), request()
    lab.stored(asked, HOST, 0)
    asked.lora_request = SimpleNamespace()
    assert lab.scheduler.find_offloaded(asked, 0) == 0
    lab.scheduler.on_allocated(asked, [0, 1, 2], 0)
    assert not lab.scheduler.build_commands(plan({"r": ([0, 1, 2], 0, 13)})).stores


def test_what_is_slow_to_come_is_computed_and_judged_once_for_each_request() -> None:
    lab = Lab()
    lab.stored(request(), HOST, 0, 1, 2)
    lab.is_slow(1.0)
    asked = request("again")
    assert [lab.scheduler.find_offloaded(asked, 0) for _ in range(40)] == [0] * 40, (
        "one request, one judgement"
    )
    assert lab.scheduler._policy.num_declined == 3
    brought = [lab.scheduler.find_offloaded(request(f"r{number}"), 0) for number in range(15)]
    assert brought == [0] * 14 + [3 * BLOCK], "every sixteenth is brought all the same"


def test_a_tier_that_was_slow_may_be_quick_again() -> None:
    lab = Lab()
    lab.stored(request(), HOST, 0, 1, 2)
    lab.is_slow(1.0)
    assert lab.scheduler.find_offloaded(request("one"), 0) == 0
    lab.scheduler.apply_update(TierUpdate(counters={HOST: TierCounters(block_s=1e-5)}))
    assert lab.scheduler.find_offloaded(request("two"), 0) == 3 * BLOCK


def test_what_did_not_come_is_computed_and_kept_again() -> None:
    lab, asked = Lab(), request()
    lab.stored(asked, HOST, 0, 1, 2)
    assert lab.scheduler.find_offloaded(asked, 0) == 3 * BLOCK
    lab.scheduler.on_allocated(asked, [5, 6, 7], 3 * BLOCK)
    lab.scheduler.build_commands(plan())
    names = [tier_messages.hash_of(tier_messages.key_of(each, b"model")) for each in asked.block_hashes]
    lab.scheduler.apply_update(TierUpdate(removed={(HOST, each): 1 for each in names[1:]}))
    assert lab.scheduler.find_offloaded(asked, BLOCK) == 0
    orders = lab.scheduler.build_commands(plan({"r": ([5, 6, 7, 8], BLOCK, 9)}))
    assert [(move.position, move.number) for move in orders.stores["r"]] == [(1, 6), (2, 7)]
    assert lab.scheduler.hits.num_hits(HOST) == 1, "what did not come is no hit"
    assert lab.scheduler.hits.num_requested == 3


def test_steps_with_prompts_are_timed() -> None:
    lab, asked = Lab(), request()
    lab.scheduler.find_offloaded(asked, 0)
    lab.scheduler.on_allocated(asked, [0, 1, 2, 3], 0)
    first = lab.scheduler.build_commands(plan({"r": ([0, 1, 2, 3], 0, 13)}))
    assert first.timed is not None
    asked.all_token_ids.append(99)
    assert lab.scheduler.build_commands(plan(cached={"r": (13, 1)})).timed is None, "it only decodes"
    lab.scheduler.apply_update(TierUpdate(step_s={first.timed: 0.5, 1234: 9.0}))
    [step] = lab.worth.times._steps
    assert step == StepStats(prefill_tokens=13, prefill_context=13 * 13, time_s=0.5)


def test_blocks_stay_until_they_are_copied_and_preempted_ones_are_waited_for() -> None:
    lab, asked = Lab(), request()
    lab.scheduler.find_offloaded(asked, 0)
    lab.scheduler.on_allocated(asked, [0, 1, 2, 3], 0)
    assert lab.scheduler.build_commands(plan({"r": ([0, 1, 2, 3], 0, 13)})).stores
    assert lab.scheduler.build_commands(plan(preempted={"r"})).preempted == {"r"}
    assert lab.scheduler.on_finished("r")
    orders = lab.scheduler.build_commands(plan())
    assert (orders.awaited, orders.preempted) == ({"r"}, set())
    assert not lab.scheduler.on_finished("another")


def test_workers_figures_are_the_metrics_of_kvolts_own_tiers() -> None:
    lab, asked = Lab(), request()
    lab.stored(asked, HOST, 0, 1, 2)
    metrics = VllmTierMetrics()
    metrics.update(0, lab.scheduler.stats(), BLOCK)
    assert not list(metrics.collect()), "nothing is known yet"
    lab.scheduler.find_offloaded(asked, 0)
    lab.scheduler.on_allocated(asked, [0, 1, 2], 3 * BLOCK)
    lab.scheduler.build_commands(plan())
    lab.scheduler.build_commands(plan({"r": ([0, 1, 2, 3], 3 * BLOCK, 1)}))
    one = TierCounters(
        num_stored=3, stored_s=0.5, num_loaded=2, failures={"late": 1}, num_slots=9, block_bytes=8
    )
    other = TierCounters(
        num_stored=2, stored_s=0.7, num_loaded=3, failures={"corrupt": 2}, num_slots=9, block_bytes=8
    )
    lab.scheduler.apply_update(TierUpdate(counters={HOST: one}).aggregate(TierUpdate(counters={HOST: other})))
    for rank in (0, 1):
        metrics.update(rank, {"KvoltTierConnector": lab.scheduler.stats()}, BLOCK)
    metrics.update(0, {"num_successful_transfers": 3}, BLOCK)  # another connector's
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    assert samples["kvolt_tier_blocks", "host"] == 6
    assert samples["kvolt_tier_capacity_blocks", "host"] == 18
    assert samples["kvolt_tier_bytes", "host"] == 48
    assert samples["kvolt_tier_stored_blocks_total", "host"] == 6
    assert samples["kvolt_tier_stored_seconds_total", "host"] == 1.4
    assert samples["kvolt_tier_loaded_blocks_total", "host"] == 6
    assert samples["kvolt_tier_failures_total", "host", "late"] == 2
    assert samples["kvolt_tier_failures_total", "host", "corrupt"] == 4
    assert samples["kvolt_tier_hit_rate", "host"] == 1.0
    assert samples["kvolt_tier_declined_blocks_total",] == 0
    assert samples["kvolt_tier_matched_tokens_total",] == 24
