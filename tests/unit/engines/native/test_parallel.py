"""Tensor parallelism over two processes: the same answers, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch
from tests.unit.engines.native.equality_lab import (
    NUM_TOP,
    Answer,
    Reference,
    after_aborts,
    answer,
    answers,
    ask,
    chunked,
    core_of,
    make_prompts,
    preempted,
)
from tests.unit.engines.native.lora_lab import merged, write_adapter
from tests.unit.engines.native.test_slab import memory_file

from kvolt.core.errors import ConfigError, EngineFailed, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.capabilities import Capabilities
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import _allocate_others, _own_memory
from kvolt.engines.native.parallel import check_degree, share
from kvolt.engines.native.setup import device_of
from kvolt.engines.native.slab import KvSlab
from kvolt.engines.native.tp_rank import TpRanks
from kvolt.models.checkpoint import open_checkpoint
from kvolt.testing.tiny_models import tiny_checkpoint

PROMPTS = make_prompts(seed=1, vocabulary=900)
PROMPT = PROMPTS["p6"]
MAX_TOKENS = 12
SMALL = {"tensor_parallel": 2, "max_batch_tokens": 16, "max_num_seqs": 6}
SMALL_ALONE = SMALL | {"tensor_parallel": 1}
TIGHT = {"block_size": 2, "kv_blocks": 80}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases everywhere: one rank alone may add those behind a sum."""
    root = tmp_path_factory.mktemp("parallel")
    return tiny_checkpoint(root / "model", seed=3, attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference.of_folder(folder)


@pytest.fixture(scope="module")
def adapter(folder: Path, reference: Reference) -> Path:
    return write_adapter(folder.parent / "adapter", reference, seed=1)


class Memories:
    """What a shell gives to its ranks."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}

    def give(self, rank: int, num_bytes: int) -> int:
        self.descriptors[rank] = memory_file(num_bytes)
        return os.dup(self.descriptors[rank])

    def tensor(self, rank: int, core: EngineCore) -> torch.Tensor:
        shape = core.runner.slab.shape
        return KvSlab(shape, "cpu", self.descriptors[rank]).tensor

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


@pytest.fixture(scope="module")
def memories() -> Iterator[Memories]:
    with closing(Memories()) as memories:
        yield memories


@pytest.fixture(scope="module")
def core(folder: Path, adapter: Path, memories: Memories) -> Iterator[EngineCore]:
    loras = {"early": str(adapter)}
    with closing(core_of(folder, memories.give, loras=loras, measure_steps=True, **SMALL, **TIGHT)) as core:
        yield core


def assert_equal(reference: Reference, found: dict[str, Answer]) -> None:
    for name, one in found.items():
        verdict = reference.compare(PROMPTS[name], one)
        assert verdict.flips == ()
        assert verdict.max_delta < 1e-3
        assert len(one.tokens) == MAX_TOKENS


def test_steps_are_measured_with_all_ranks(core: EngineCore) -> None:
    assert core.info.latency is not None


@pytest.mark.parametrize("run", [chunked, preempted, after_aborts])
def test_answers_equal_those_of_transformers(core: EngineCore, reference: Reference, run: object) -> None:
    requests = [ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in PROMPTS.items()]
    assert callable(run)
    found = run(core, requests)
    assert found.keys() == PROMPTS.keys()
    assert_equal(reference, found)


def test_cached_blocks_are_found_on_every_rank(core: EngineCore, reference: Reference) -> None:
    core.capabilities.clear_kv()
    for cached in (0, (len(PROMPT) - 1) // 2 * 2):
        found = answer(core, ask("p6", PROMPT, MAX_TOKENS, logprobs=NUM_TOP))
        assert found.cached == cached
        assert_equal(reference, {"p6": found})


def test_adapters_are_shared_by_the_ranks(core: EngineCore, reference: Reference, adapter: Path) -> None:
    with_adapter = merged(reference, adapter)

    def asked(lora: str) -> dict[str, Answer]:
        changed = ask("p6", PROMPT, MAX_TOKENS, request={"lora": lora}, logprobs=NUM_TOP)
        return answers(core, changed, ask("p5", PROMPTS["p5"], MAX_TOKENS))

    for lora in ("early", "late"):
        if lora == "late":
            core.capabilities.load_lora("late", str(adapter))
        found = asked(lora)
        assert_equal(with_adapter, {"p6": found["p6"]})
        assert_equal(reference, {"p5": found["p5"]})
    core.capabilities.unload_lora("late")
    assert_equal(reference, {"p6": answer(core, ask("p6", PROMPT, MAX_TOKENS))})


def test_embeddings_are_those_of_one_rank(folder: Path, core: EngineCore) -> None:
    alone = core_of(folder).capabilities.embed(list(PROMPTS.values()))
    for ours, theirs in zip(core.capabilities.embed(list(PROMPTS.values())), alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


# --- Blocks ---------------------------------------------------------------------------------------------


def test_each_rank_has_its_heads_in_the_memory_it_was_given(
    folder: Path, core: EngineCore, memories: Memories
) -> None:
    """So that the ranks' heads side by side are the blocks of one rank."""
    with closing(core_of(folder, **SMALL_ALONE, **TIGHT)) as alone:
        blocks = {}
        for each in (core, alone):
            each.capabilities.clear_kv()
            answer(each, ask("p6", PROMPT, 1))
            keys = each.capabilities._exchange.keys(ask("p6", PROMPT, 1))
            blocks[each] = [each.scheduler.pool.block_of(key) for key in keys]
        shared = torch.cat([memories.tensor(rank, core)[blocks[core]] for rank in range(2)], dim=3)
        whole = alone.runner.slab.tensor[blocks[alone]]
        assert len(blocks[core]) == len(PROMPT) // 2
        assert whole.abs().max() > 0.1
        assert torch.allclose(shared, whole, atol=1e-5)


def test_whole_blocks_are_offered_where_the_ranks_memories_are_shared(core: EngineCore) -> None:
    assert {"KvMovable", "KvAddressable", "Prefill"} <= set(core.info.features)


def test_where_they_are_not_it_says_so(folder: Path) -> None:
    """Ranks on devices, or without a shell that gives them memory: each allocates its own, which others
    cannot access."""
    with closing(core_of(folder)) as alone:
        told = StubRanks()
        setup = SimpleNamespace(device=torch.device("cpu"))
        found = _allocate_others(told, alone.runner.slab, 2, setup, _own_memory)  # type: ignore[arg-type]
        assert (found, told.memories) == (False, [])
        blocks = Capabilities(alone, found, time.monotonic)
        with pytest.raises(Unsupported, match="tensor_parallel = 1"):
            blocks.held_kv(RequestId("r"))
        with pytest.raises(Unsupported, match="ranks"):
            blocks.allocate_kv([], [])


class StubRanks:
    memories: Sequence[int] | None = None

    def allocate(self, num_blocks: int, memories: Sequence[int]) -> None:
        self.memories = memories


_LEADER = """
import multiprocessing, sys
if __name__ == "__main__":
    from kvolt.core.request import Role
    from kvolt.engines.native.arguments import NativeArguments
    from kvolt.engines.native.loading import load_core
    from kvolt.engines.contract import EngineSpec
    spec = EngineSpec(model=sys.argv[1], role=Role.AGGREGATED)
    core = load_core(spec, NativeArguments(kv_blocks=8, tensor_parallel=2, threads=1))
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    sys.stdin.read()
"""


def test_a_leader_that_is_killed_takes_its_ranks_along(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "leader.py"
    script.write_text(_LEADER)
    command = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        assert psutil.pid_exists(pid)
        leader.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a rank is left behind"
        time.sleep(0.05)


def test_a_rank_that_cannot_start_reports_its_error(tmp_path: Path) -> None:
    spec = EngineSpec(model="m", role=Role.AGGREGATED)
    tp_ranks = TpRanks(spec, NativeArguments(tensor_parallel=2, device="cpu"), tmp_path / "nothing")
    try:
        with pytest.raises(EngineFailed, match=r"rank-1 did not start: .*nothing"):
            tp_ranks.wait_started()
    finally:
        tp_ranks.close()


def test_ranks_need_a_device_each() -> None:
    spec = EngineSpec(model="m", role=Role.AGGREGATED)
    two = NativeArguments(tensor_parallel=2)
    with pytest.raises(ConfigError, match="2 ranks need as many devices"):
        device_of(EngineSpec(model="m", role=Role.AGGREGATED, devices=("cpu",)), two, 1)
    with pytest.raises(ConfigError, match="cannot share cuda:0"):
        device_of(spec, msgspec.structs.replace(two, device="cuda:0"), 0)
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"{absent} does not exist"):
        device_of(spec, NativeArguments(device=absent), 0)
    assert device_of(spec, NativeArguments(device="cpu"), 0) == torch.device("cpu")


# --- Shares ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_shares_make_up_the_whole(degree: int) -> None:
    whole = torch.arange(96).view(8, 12)
    for dim in (0, 1):
        parts = [share(whole, dim, rank, degree) for rank in range(degree)]
        assert torch.equal(torch.cat(parts, dim=dim), whole)


@pytest.mark.parametrize(("degree", "name"), [(3, "num_heads"), (4, "num_kv_heads")])
def test_a_model_that_cannot_be_shared_evenly_is_refused(folder: Path, degree: int, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_degree(open_checkpoint(folder).config, degree)
    with pytest.raises(ConfigError, match=name):
        core_of(folder, tensor_parallel=degree)
