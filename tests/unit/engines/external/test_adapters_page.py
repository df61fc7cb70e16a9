"""The adapter of docs/adapters.md, as it stands there, in front of an engine of a few lines."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest
from msgspec.structs import replace
from tests.unit.engines.remote.lab import greedy
from tests.unit.engines.vllm.fake_core import ENDS, VOCAB_SIZE, logprob_row, next_token
from tests.unit.engines.vllm.lab import make_model

from kvolt.core.delta import TokenLogprobs
from kvolt.core.errors import ConfigError, EngineDied, EngineFailed, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Role
from kvolt.engines import registry
from kvolt.engines.contract import EngineSpec
from kvolt.testing.engines.answer_cases import prompt_logprobs_come_once
from kvolt.testing.engines.harness import Harness, NotRun, engine_run
from kvolt.testing.engines.suite import CASES
from kvolt.testing.engines.tiers import suites_for

PAGE = Path(__file__).parents[4] / "docs" / "adapters.md"


@dataclass
class Output:
    name: str
    token: int
    logprobs: TokenLogprobs


@dataclass
class _Params:
    temperature: float
    seed: int | None


@dataclass
class _Sequence:
    tokens: list[int]
    num_given: int
    params: _Params
    num_logprobs: int


@dataclass
class AcmeEngine:
    """Of the package that the page speaks of. Draws by position, so that whoever resumes draws on."""

    model: str
    is_broken: bool = False
    context_length: int = 256
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 8
    vocab_size: int = VOCAB_SIZE
    is_shut: bool = False
    sequences: dict[str, _Sequence] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    made: ClassVar[list[AcmeEngine]] = []

    def __post_init__(self) -> None:
        self.made.append(self)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def num_running(self) -> int:
        return min(len(self.sequences), self.max_num_seqs)

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - self.num_running

    @property
    def num_tokens(self) -> int:
        with self.lock:
            return sum(len(each.tokens) for each in [*self.sequences.values()][: self.max_num_seqs])

    def add(
        self, name: str, tokens: list[int], *, seed: int | None, num_logprobs: int | None, **sampling: Any
    ) -> None:
        with self.lock:
            params = _Params(sampling["temperature"], seed)
            self.sequences[name] = _Sequence(list(tokens), len(tokens), params, num_logprobs or 0)

    def cancel(self, name: str) -> None:
        with self.lock:
            self.sequences.pop(name, None)

    def step(self) -> list[Output]:
        if self.is_broken:
            raise RuntimeError("a wheel came off")
        with self.lock:
            return [self._next(*each) for each in [*self.sequences.items()][: self.max_num_seqs]]

    def _next(self, name: str, sequence: _Sequence) -> Output:
        token, drawn = next_token(sequence.tokens, sequence.params, len(sequence.tokens), "")
        sequence.tokens.append(token)
        ids, values = logprob_row(token, drawn, sequence.num_logprobs)
        return Output(
            name, token, TokenLogprobs(token, values[0], tuple(zip(ids[1:], values[1:], strict=True)))
        )

    def shut_down(self) -> None:
        self.is_shut = True


def _adapter() -> ModuleType:
    """The page's first block of code, as the module that it would be."""
    [code] = re.findall(r"^```python\n(\"\"\".*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    module = ModuleType("kvolt_acme")
    sys.modules["kvolt_acme"] = module  # dataclasses look their annotations up there
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    acme: Any = ModuleType("acme")
    acme.Engine, acme.Output = AcmeEngine, Output
    monkeypatch.setitem(sys.modules, "acme", acme)
    monkeypatch.setitem(sys.modules, "kvolt_acme", ModuleType("kvolt_acme"))
    monkeypatch.setattr(AcmeEngine, "made", [])
    return _adapter()


class AcmeHarness:
    def __init__(self, adapter: ModuleType, folder: Path, **arguments: Any) -> None:
        self._adapter = adapter
        self._spec = EngineSpec(model=make_model(folder / "model"), role=Role.AGGREGATED)
        self._arguments = adapter.AcmeArguments(served_name="tiny", **arguments)

    def engine(self) -> Any:
        return self._adapter.AcmeEngine(self._spec, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(100, 100 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        for last in range(10, 900):
            lengths = [_length((ENDS, 9, last), seed) for seed in (1, 2)]
            if all(3 <= length <= 30 for length in lengths) and lengths[0] != lengths[1]:
                return (ENDS, 9, last)
        raise AssertionError("no such prompt")


def _length(prompt: tuple[int, ...], seed: int) -> int:
    engine = AcmeEngine("none")
    engine.add("r", list(prompt), seed=seed, num_logprobs=None, temperature=1.0)
    return next((at for at in range(1, 100) if engine.step()[0].token in (2, 5)), 100)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_core_tier(case: Any, adapter: ModuleType, tmp_path: Path) -> None:
    harness: Harness = AcmeHarness(adapter, tmp_path)
    assert case in suites_for(harness.engine())
    if case is prompt_logprobs_come_once:
        with pytest.raises(NotRun):  # it declares no such field
            await case(harness)
        return
    try:
        await case(harness)
    except NotRun as reason:
        pytest.fail(f"not run: {reason}")
    assert all(each.is_shut for each in AcmeEngine.made if each.model != "none")


async def test_engine_failure_is_reported(adapter: ModuleType, tmp_path: Path) -> None:
    engine = AcmeHarness(adapter, tmp_path).engine()
    await engine.start()
    [llm] = AcmeEngine.made
    llm.is_broken = True
    engine.submit(greedy("r"))
    with pytest.raises(EngineFailed, match="Acme failed: a wheel came off"):
        async for _ in engine.steps():
            pass
    with pytest.raises(EngineDied, match="a wheel came off"):
        engine.submit(greedy("late"))
    await engine.close()
    assert llm.is_shut


async def test_what_it_cannot_follow_is_refused(adapter: ModuleType, tmp_path: Path) -> None:
    async with engine_run(AcmeHarness(adapter, tmp_path)) as run:
        request = run.request("r")
        with pytest.raises(Unsupported):
            run.engine.submit(replace(request, grammar=Grammar(GrammarKind.REGEX, "a")))
        with pytest.raises(Unsupported):
            run.engine.submit(replace(request, extra={"vllm_xargs": {}}))
        assert not AcmeEngine.made[0].sequences
        await run.answer(replace(request, request_id=RequestId("good")))


class _Point(NamedTuple):
    name: str
    value: str
    load: Callable[[], Any]


def test_it_is_found_by_its_entry_point(
    adapter: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = _Point("acme", "kvolt_acme:KIND", lambda: adapter.KIND)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    spec = EngineSpec(model=str(tmp_path), role=Role.AGGREGATED)
    assert isinstance(registry.build_engine("acme", spec, {"max_waiting": 3}), adapter.AcmeEngine)
    with pytest.raises(ConfigError, match="max_waitin"):
        registry.build_engine("acme", spec, {"max_waitin": 3})
