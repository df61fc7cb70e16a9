"""The shadow policy: how often it agrees, and its predicted effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.router.selection.test_selector import A, B, Held, Scene, prompt, worker

from kvolt.core.errors import ConfigError
from kvolt.router.policy.custom import CustomPolicy
from kvolt.router.policy.policy import LatencyWeights, RequestView, WorkersView, classic, latency
from kvolt.router.policy.registry import POLICIES, find_policy, shadow_policy
from kvolt.router.policy.shadow import ShadowPolicy
from kvolt.runtime.config.router_settings import RouterSettings


def test_it_agrees_and_disagrees_and_decides_nothing() -> None:
    here = Scene({A: worker(), B: worker()}, Held(a0=range(20)), policy=latency())
    here.selector.shadow = shadow = ShadowPolicy("turned", lambda asked, seen: -latency()(asked, seen))
    for _ in range(3):
        choice = here.selector.choose(prompt(*range(20)), here.allowed)
        assert choice.worker_rank == (A, 0)
    assert shadow.stats.num_decisions == 0, "nothing was acted on"
    ticket = here.selector.reserve(choice)
    assert (shadow.stats.num_decisions, shadow.stats.num_agreed) == (1, 0)
    held, computed = 0.01 + 1 * 0.0001, 0.01 + 321 * 0.0001
    assert shadow.stats.ttft_gain_s == pytest.approx(held - computed), "it would be later"
    here.selector.release(ticket, None)
    here.selector.shadow = same = ShadowPolicy("latency", latency())
    here.book(prompt(*range(20)))
    assert (same.stats.num_decisions, same.stats.num_agreed, same.stats.ttft_gain_s) == (1, 1, 0.0)


def test_equals_are_an_agreement() -> None:
    here = Scene({A: worker(), B: worker()})
    here.selector.shadow = shadow = ShadowPolicy("classic", classic())
    for number in range(20):
        here.selector.release(here.book(prompt(number)), None)
    assert shadow.stats.num_agreed == 20


def test_the_shadow_policy_chooses_among_the_same_candidates() -> None:
    here = Scene({A: worker(seqs=1), B: worker()}, Held(a0=range(20)))
    here.selector.mark_first_token(here.selector.reserve(here.selector.choose(prompt(99), (A,))), None)
    here.selector.shadow = shadow = ShadowPolicy("latency", latency())
    assert here.where(prompt(*range(20))) == (B, 0)
    here.book(prompt(*range(20)))
    assert shadow.stats.num_agreed == 1


def test_preferred_taints_count_for_it_too() -> None:
    here = Scene({A: worker(taints=("gpu",)), B: worker()})
    here.selector.shadow = shadow = ShadowPolicy("latency", latency())
    here.book(prompt(1, preferred_taints={"gpu": 2.0}))
    assert shadow.stats.num_agreed == 1


def test_without_an_opinion_it_is_silent() -> None:
    def nothing(asked: RequestView, seen: WorkersView) -> None:
        return None

    here = Scene({A: worker()})
    here.selector.shadow = shadow = ShadowPolicy("broken", nothing)
    here.book(prompt(1))
    assert (shadow.stats.num_decisions, shadow.stats.num_failed, shadow.stats.num_agreed) == (1, 1, 0)


def test_policies_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def cost(request, workers):\n    return workers.blocks\n")
    settings = RouterSettings()
    assert set(POLICIES) == {"latency", "classic"}
    assert isinstance(find_policy(f"{path}:cost", settings), CustomPolicy)
    with pytest.raises(ConfigError, match="unknown policy: 'fastest'"):
        find_policy("fastest", settings)
    assert shadow_policy(settings) is None
    made = shadow_policy(RouterSettings(shadow=f"{path}:cost"))
    assert made is not None
    assert made[0].name == f"{path}:cost"
    with pytest.raises(ConfigError):
        shadow_policy(RouterSettings(shadow="round-robin"))


def test_the_settings_weigh() -> None:
    from tests.unit.router.policy.test_policy import ASKED, workers

    seen = workers(prefill_s=[0.2, 0.2], decoding=[5, 1], requests=[9, 1], blocks=[9, 0], affinity=[1, 0])
    settings = RouterSettings(
        room_weight=3.0,
        affinity_s=4.0,
        overlap_weight=5.0,
        affinity_blocks=6.0,
    )
    ours = find_policy("latency", settings)(ASKED, seen)
    assert ours.tolist() == latency(LatencyWeights(3.0, 4.0))(ASKED, seen).tolist()
    assert find_policy("classic", settings)(ASKED, seen).tolist() == [5 * 10 + 9 + 10 - 6, 5 * 10 + 10]
