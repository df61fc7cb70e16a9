"""An EngineCore driven step by step, and transformers beside it.

The reference does not generate. It reads prompt and answer in one pass and says what it would have chosen at
every place of the answer: where that is our token each time, greedy answers are equal by induction. Where it is
not, the distance of its two best logits says whether the difference can be one of rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from kvolt.core.delta import Delta, FinishReason, StepOutput, TokenLogprobs, Usage
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import KvMemory, _own_memory, load_core

disable_progress_bar()

Prompts = Mapping[str, tuple[int, ...]]
TIE = 1e-4
"""Two logits of the reference that are closer may change places in float32."""
NUM_TOP = 5
"""How many alternatives are compared at each token."""


# --- Requests and answers -------------------------------------------------------------------------------


class Watch:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 100.0

    def monotonic(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


def core_of(model: Path | str, memory: KvMemory = _own_memory, **arguments: Any) -> EngineCore:
    """Exact and small, unless told otherwise. One thread: several that wait for each other on cores that other
    processes use make them ten times slower. Steps are not measured."""
    given: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "kv_blocks": 256,
        "context_length": 512,
        "threads": 1,
        "measure_steps": False,
    } | arguments
    return load_core(EngineSpec(model=str(model), role=Role.AGGREGATED), NativeArguments(**given), memory)


def ask(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 12,
    *,
    stop: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Request:
    """Greedy and not ended by EOS, unless told otherwise."""
    ends = {"max_tokens": max_tokens, "ignore_eos": True} | dict(stop or {})
    return Request(
        request_id=RequestId(name),
        model="m",
        token_ids=tuple(prompt),
        stop=StopConditions(**ends),
        sampling=Sampling(**({"temperature": 0.0} | sampling)),
        **dict(request or {}),
    )


@dataclass(slots=True)
class Answer:
    """What came of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached: int | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish is None, "a choice goes on after its end"
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.cached = delta.cached_tokens if delta.cached_tokens is not None else self.cached
        self.finish, self.stop_reason, self.usage = delta.finish, delta.stop_reason, delta.usage


class Drive:
    """Requests on their way through a core; the answers so far."""

    def __init__(self, core: EngineCore, requests: Iterable[Request] = ()) -> None:
        self.core = core
        self.choices: dict[tuple[str, int], Answer] = {}
        self.failed: dict[str, ErrorInfo] = {}
        self.num_steps = 0
        for request in requests:
            self.submit(request)

    def submit(self, request: Request) -> None:
        self.core.submit(request)

    def step(self) -> StepOutput | None:
        output = self.core.step()
        self.num_steps += 1
        if output is not None:
            for request_id, delta in output.deltas:
                self.choices.setdefault((request_id, delta.index), Answer()).take(delta)
            for request_id, token in zip(output.plain_ids, output.plain_tokens, strict=True):
                self.choices[request_id, 0].take(Delta(token_ids=(token,)))
            for request_id, error in output.failed:
                assert request_id not in self.failed, "a request failed twice"
                self.failed[request_id] = error
        return output

    def finish(self) -> dict[str, Answer]:
        """Run to the end; the first choice of every request that has one."""
        while self.core.has_work:
            self.step()
        assert_at_rest(self.core)
        return {name: answer for (name, index), answer in self.choices.items() if index == 0}


def answers(core: EngineCore, *requests: Request) -> dict[str, Answer]:
    """All at once."""
    drive = Drive(core, requests)
    found = drive.finish()
    assert not drive.failed
    return found


def answer(core: EngineCore, request: Request) -> Answer:
    return answers(core, request)[request.request_id]


def assert_at_rest(core: EngineCore) -> None:
    core.scheduler.check_integrity()
    assert not core.has_work
    assert core.scheduler.pool.num_used == 0
    assert core.load().running == core.load().waiting == core.load().kv_used_blocks == 0


def make_prompts(
    seed: int, vocabulary: int, count: int = 12, longest: int = 90
) -> dict[str, tuple[int, ...]]:
    """Of all lengths, and some with a beginning in common."""
    dice = random.Random(seed)
    shared = [dice.randrange(vocabulary) for _ in range(longest // 2)]
    prompts = {}
    for number in range(count):
        length = 1 + number * (longest - 1) // max(count - 1, 1)
        own = [dice.randrange(vocabulary) for _ in range(length)]
        is_sharing = number % 3 == 2
        prompts[f"p{number}"] = tuple((shared + own)[:longest] if is_sharing else own)
    return prompts


# --- Ways to run the same requests ----------------------------------------------------------------------


class Mode(NamedTuple):
    """`arguments` of the core; `run` also sees to it that what the mode is named for has happened."""

    name: str
    run: Callable[[EngineCore, Sequence[Request]], dict[str, Answer]]
    arguments: Mapping[str, Any] = {}


def alone(core: EngineCore, requests: Sequence[Request]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for request in requests:
        core.capabilities.clear_kv()
        found[request.request_id] = answer(core, request)
        assert found[request.request_id].cached == 0
    return found


def batched(core: EngineCore, requests: Sequence[Request]) -> dict[str, Answer]:
    """They arrive over the first steps, so that some decode while others prefill."""
    core.capabilities.clear_kv()
    drive = Drive(core)
    half = len(requests) // 2
    for request in requests[:half]:
        drive.submit(request)
    most_running = 0
    for request in requests[half:]:
        drive.step()
        drive.submit(request)
        most_running = max(most_running, core.scheduler.num_running)
    assert most_running > min(half, core.scheduler.limits.max_num_seqs) // 2
    return drive.finish()


def prefix_hits(core: EngineCore, requests: Sequence[Request]) -> dict[str, Answer]:
    """The second ask."""
    core.capabilities.clear_kv()
    first = answers(core, *requests)
    second = answers(core, *requests)
    block_size = core.scheduler.limits.block_size
    for request in requests:
        found, name = second[request.request_id], request.request_id
        assert found.cached == (len(request.token_ids) - 1) // block_size * block_size
        assert found.usage is not None
        assert found.usage.cached_tokens == found.cached
        assert found.tokens == first[name].tokens
    assert sum(found.cached or 0 for found in second.values()) > 0
    return second


def chunked(core: EngineCore, requests: Sequence[Request]) -> dict[str, Answer]:
    core.capabilities.clear_kv()
    drive = Drive(core, requests)
    budget = core.scheduler.limits.max_batch_tokens
    assert max(len(request.token_ids) for request in requests) > 2 * budget
    steps = []
    while core.has_work:
        output = drive.step()
        assert output is not None
        assert output.load is not None
        assert output.load.step is not None
        steps.append(output.load.step)
    assert all(step.batch + step.prefill_tokens <= budget for step in steps)
    assert any(step.batch and step.prefill_tokens for step in steps)
    return drive.finish()


def preempted(core: EngineCore, requests: Sequence[Request]) -> dict[str, Answer]:
    core.capabilities.clear_kv()
    before = core.scheduler.planner.num_preemptions
    found = answers(core, *requests)
    assert core.scheduler.planner.num_preemptions > before
    return found


def after_aborts(core: EngineCore, requests: Sequence[Request]) -> dict[str, Answer]:
    """Requests come and are aborted at random; then the same core answers as if nothing had been."""
    core.capabilities.clear_kv()
    dice = random.Random(len(requests))
    live: list[RequestId] = []
    num_aborted = 0
    for wave in range(3):
        for request in requests:
            name = RequestId(f"{request.request_id}-{wave}")
            core.submit(ask(name, request.token_ids, 24, num_choices=1 + dice.randrange(2), temperature=1.0))
            live.append(name)
            if dice.random() < 0.5:
                core.step()
                core.scheduler.check_integrity()
            for _ in range(dice.randrange(3)):
                if live:
                    core.abort(live.pop(dice.randrange(len(live))))
                    num_aborted += 1
                    core.scheduler.check_integrity()
    for name in live:
        core.abort(name)
    assert num_aborted > len(requests)
    assert_at_rest(core)
    return answers(core, *requests)


MODES = (
    Mode("alone", alone),
    Mode("batched", batched),
    Mode("prefix hits", prefix_hits),
    Mode("chunked prefill", chunked, {"max_batch_tokens": 16, "max_num_seqs": 6}),
    Mode("preempted", preempted, {"block_size": 2, "kv_blocks": 80}),
    Mode("after aborts", after_aborts, {"kv_blocks": 40}),
)
"""In one process. Numbers are for prompts of 90 tokens; larger ones replace them."""


# --- The reference --------------------------------------------------------------------------------------


class Flip(NamedTuple):
    """A place where the reference prefers another token."""

    place: int
    ours: int
    theirs: int
    gap: float
    """Between the reference's two best logits."""


class Verdict(NamedTuple):
    flips: tuple[Flip, ...]
    max_delta: float
    """Largest difference of a log probability, of those that the answer has."""


class Reading(NamedTuple):
    """What the reference has to say of one answer."""

    best: list[int]
    gaps: list[float]
    chosen: torch.Tensor
    top: torch.Tensor


class Reference:
    """A transformers model. What it read once it remembers."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self._readings: dict[tuple[tuple[int, ...], tuple[int, ...]], Reading] = {}

    @classmethod
    def of_folder(cls, folder: Path) -> Reference:
        return cls(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        )

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]: each row says what comes next."""
        found: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].float()
        return found

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What it says by itself, for a check of the way we compare."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def compare(self, prompt: Sequence[int], found: Answer) -> Verdict:
        reading = self.read(tuple(prompt), tuple(found.tokens))
        flips = tuple(
            Flip(place, ours, theirs, gap)
            for place, (ours, theirs, gap) in enumerate(
                zip(found.tokens, reading.best, reading.gaps, strict=True)
            )
            if ours != theirs
        )
        delta = 0.0
        if found.logprobs:
            assert [one.token_id for one in found.logprobs] == found.tokens
            ours_chosen = torch.tensor([one.logprob for one in found.logprobs])
            ours_top = torch.tensor([[value for _, value in one.top] for one in found.logprobs])
            theirs_top = reading.top[:, : ours_top.shape[1]]
            deltas = torch.cat(((ours_chosen - reading.chosen)[:, None], ours_top - theirs_top), dim=1)
            delta = float(deltas.abs().max())
        return Verdict(flips, delta)

    def read(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Reading:
        key = (prompt, tokens)
        if key not in self._readings:
            logits = self.logits(prompt + tokens)[len(prompt) - 1 : -1]
            best = logits.topk(2)
            all_logprobs = logits.log_softmax(dim=-1)
            self._readings[key] = Reading(
                best.indices[:, 0].tolist(),
                (best.values[:, 0] - best.values[:, 1]).tolist(),
                all_logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0],
                all_logprobs.topk(NUM_TOP).values,
            )
        return self._readings[key]
