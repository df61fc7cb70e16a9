"""The full count: 50 prompts, 48 tokens each, with SmolLM2-135M-Instruct and a small random Qwen3.

In float32 every token is the one that transformers prefers after the same tokens, or its two best logits are
closer than `TIE`: then the order of sums decides, and it is counted. In bfloat16 a token may be another where the
reference's two best logits (in float32) are closer than `BFLOAT16_BOUND`; also counted, beside what
transformers itself does in bfloat16. With KVOLT_RESULTS set to a folder the table is written to
`equality.txt` in it.
"""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tests.long.equality_prompts import chat_prompts
from tests.unit.engines.native.equality_lab import (
    MODES,
    NUM_TOP,
    TIE,
    Answer,
    Flip,
    Mode,
    Prompts,
    Reference,
    after_aborts,
    alone,
    answers,
    ask,
    batched,
    chunked,
    core_of,
    make_prompts,
    preempted,
)
from transformers import LlamaConfig, LlamaForCausalLM

from kvolt.core.errors import ConfigError
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.parallel import check_degree
from kvolt.models.checkpoint import open_checkpoint
from kvolt.models.resolve import resolve
from kvolt.testing.tiny_models import tiny_checkpoint

NUM_PROMPTS, MAX_TOKENS = 50, 48
MAX_DELTA = 1e-3
BFLOAT16_BOUND = 0.5

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


class Subject(NamedTuple):
    """A model, its prompts, and the same weights in transformers."""

    name: str
    path: str
    prompts: Prompts
    reference: Reference


@dataclass(slots=True)
class Table:
    rows: list[str] = field(default_factory=list)

    def add(
        self,
        subject: Subject,
        mode: str,
        found: Sequence[Answer],
        differing: int,
        ties: str,
        delta: float | None,
    ) -> None:
        tokens = sum(len(one.tokens) for one in found)
        figure = "-" if delta is None else f"{delta:.1e}"
        self.rows.append(
            f"{subject.name:<14}  {mode:<34}  {len(found):>7}  {tokens:>6}  {differing:>10}  {ties:>22}  {figure:>13}"
        )

    def text(self) -> str:
        heading = (
            f"{'model':<14}  {'mode':<34}  {'prompts':>7}  {'tokens':>6}  {'mismatches':>10}"
            f"  {'allowed (largest gap)':>22}  {'max |dlogprob|':>13}"
        )
        return "\n".join(
            (
                f"kvolt beside transformers {transformers.__version__}, torch {torch.__version__}, "
                f"{platform.machine()}, 1 thread a process",
                f"Greedy, {MAX_TOKENS} tokens a prompt, EOS ignored. A mismatch is a token that transformers (float32) "
                "does not prefer after the same tokens,",
                f"unless its two best logits are closer than {TIE:g} (float32) or {BFLOAT16_BOUND:g} (bfloat16): "
                "those are counted as allowed.",
                f"Log probabilities: the chosen token and the {NUM_TOP} likeliest of every position.",
                "",
                heading,
                "-" * len(heading),
                *self.rows,
                "",
            )
        )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    made = Table()
    yield made
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{made.text()}")
    folder = os.environ.get("KVOLT_RESULTS")
    if folder:
        (Path(folder) / "equality.txt").write_text(made.text())


def smollm2() -> Subject:
    """Its shape is written down here, so that a config misread is seen; its tensors are those of our checkpoint."""
    path = resolve("smollm2-135m", lambda what, done, total: None).path
    checkpoint = open_checkpoint(Path(path))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float()
    state = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return Subject("smollm2-135m", str(path), chat_prompts(checkpoint.tokenizer_json), Reference(model))


def qwen3(folder: Path) -> Subject:
    tiny_checkpoint(
        folder,
        "Qwen3ForCausalLM",
        seed=1,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    )
    prompts = make_prompts(seed=2, vocabulary=900, count=NUM_PROMPTS, longest=200)
    return Subject("random qwen3", str(folder), prompts, Reference.of_folder(folder))


@pytest.fixture(scope="module", params=["smollm2", "qwen3"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.set_num_threads(1)  # as `core_of` does
    made = smollm2() if request.param == "smollm2" else qwen3(tmp_path_factory.mktemp("qwen3") / "model")
    assert len(made.prompts) == NUM_PROMPTS
    return made


FULL: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_batch_tokens": 32, "max_num_seqs": 16},
    "preempted": {"block_size": 4, "kv_blocks": 160},
    "after aborts": {"kv_blocks": 120},
}
PARALLEL = (
    Mode("batched", batched),
    Mode("chunked, preempted", preempted, FULL["chunked prefill"] | FULL["preempted"]),
    Mode("chunked, after aborts", after_aborts, FULL["chunked prefill"] | FULL["after aborts"]),
)


def loaded(subject: Subject, **arguments: Any) -> EngineCore:
    return core_of(subject.path, **({"kv_blocks": 1024} | arguments))


def run(subject: Subject, mode: Mode, **arguments: Any) -> dict[str, Answer]:
    core = loaded(subject, **arguments)
    try:
        requests = [
            ask(name, prompt, MAX_TOKENS, logprobs=NUM_TOP) for name, prompt in subject.prompts.items()
        ]
        found = mode.run(core, requests)
    finally:
        core.close()
    assert found.keys() == subject.prompts.keys()
    assert all(len(one.tokens) == MAX_TOKENS for one in found.values())
    return found


def judged(subject: Subject, found: dict[str, Answer]) -> tuple[list[Flip], float]:
    verdicts = [subject.reference.compare(prompt, found[name]) for name, prompt in subject.prompts.items()]
    return [flip for verdict in verdicts for flip in verdict.flips], max(each.max_delta for each in verdicts)


def counted(flips: Sequence[Flip]) -> str:
    return f"{len(flips)} ({max((flip.gap for flip in flips), default=0):.2g})" if flips else "0"


def check(subject: Subject, table: Table, mode: Mode, **arguments: Any) -> None:
    found = run(subject, mode, **arguments)
    flips, delta = judged(subject, found)
    wrong = [flip for flip in flips if flip.gap >= TIE]
    ties = [flip for flip in flips if flip.gap < TIE]
    ranks = f", {arguments['tensor_parallel']} ranks" if "tensor_parallel" in arguments else ""
    table.add(subject, f"{mode.name}{ranks}", list(found.values()), len(wrong), counted(ties), delta)
    assert wrong == []
    assert delta < MAX_DELTA


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_float32_equals_transformers(subject: Subject, table: Table, mode: Mode) -> None:
    check(subject, table, mode, **FULL.get(mode.name, {}))


@pytest.mark.parametrize("mode", PARALLEL, ids=lambda mode: mode.name)
def test_float32_equals_transformers_over_several_ranks(subject: Subject, table: Table, mode: Mode) -> None:
    """Over two; over three where two cannot share the model's heads."""
    config = open_checkpoint(Path(subject.path)).config
    try:
        check_degree(config, 2)
        ranks = 2
    except ConfigError:
        ranks = 3
    check(subject, table, mode, tensor_parallel=ranks, **mode.arguments)


def test_the_same_seed_gives_the_same_text_alone_and_batched(subject: Subject, table: Table) -> None:
    some = dict(list(subject.prompts.items())[::5])
    requests = [
        ask(name, prompt, MAX_TOKENS, temperature=0.8, top_p=0.9, seed=number)
        for number, (name, prompt) in enumerate(some.items())
    ]
    core = loaded(subject, **FULL["chunked prefill"])
    single, together = alone(core, requests), chunked(core, requests)
    differing = sum(single[name].tokens != together[name].tokens for name in some)
    table.add(subject, "seeded 0.8/0.9, alone = batched", list(together.values()), differing, "-", None)
    assert differing == 0


def test_bfloat16_differs_only_where_two_tokens_are_close(subject: Subject, table: Table) -> None:
    found = run(subject, Mode("", lambda core, requests: answers(core, *requests)), dtype="bfloat16")
    flips, delta = judged(subject, found)
    wrong = [flip for flip in flips if flip.gap >= BFLOAT16_BOUND]
    allowed = [flip for flip in flips if flip.gap < BFLOAT16_BOUND]
    table.add(subject, "bfloat16, batched", list(found.values()), len(wrong), counted(allowed), delta)
    theirs = Reference(copy.deepcopy(subject.reference.model).to(torch.bfloat16))
    own: list[Flip] = []
    for name, prompt in subject.prompts.items():
        exact, rounded = (
            each.read(prompt, tuple(found[name].tokens)) for each in (subject.reference, theirs)
        )
        own += [
            Flip(place, ours, best, gap)
            for place, (ours, best, gap) in enumerate(zip(rounded.best, exact.best, exact.gaps, strict=True))
            if ours != best
        ]
    beyond = [flip for flip in own if flip.gap >= BFLOAT16_BOUND]
    within = [flip for flip in own if flip.gap < BFLOAT16_BOUND]
    table.add(subject, "(transformers in bfloat16)", list(found.values()), len(beyond), counted(within), None)
    assert wrong == []
