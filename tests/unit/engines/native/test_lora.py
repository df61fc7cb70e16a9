"""Adapters: answers equal transformers' with the adapter merged into the weights, in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engines.native.equality_lab import (
    NUM_TOP,
    Answer,
    Drive,
    Reference,
    answer,
    answers,
    ask,
    assert_at_rest,
    core_of,
    make_prompts,
)
from tests.unit.engines.native.lora_lab import merged, write_adapter

from kvolt.core.errors import ConfigError, EngineFailed, InvalidRequest, NotFound
from kvolt.core.request import Request
from kvolt.testing.tiny_models import tiny_checkpoint

PROMPTS = make_prompts(seed=11, vocabulary=900, count=5, longest=70)
PROMPT = PROMPTS["p4"]
MAX_TOKENS = 10


class Family(NamedTuple):
    folder: Path
    base: Reference
    adapters: dict[str, Path]
    references: dict[str | None, Reference]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp("lora")
    folder = tiny_checkpoint(root / "model", seed=8)
    base = Reference.of_folder(folder)
    adapters = {
        "all": write_adapter(root / "all", base, seed=1),
        "some": write_adapter(root / "some", base, seed=2, modules=("k_proj", "v_proj", "down_proj"), rank=3),
    }
    references: dict[str | None, Reference] = {None: base}
    references |= {name: merged(base, path) for name, path in adapters.items()}
    return Family(folder, base, adapters, references)


def asked(lora: str | None, name: str, prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> Request:
    return ask(f"{lora}/{name}", prompt, max_tokens, request={"lora": lora}, logprobs=NUM_TOP)


def assert_equal(family: Family, found: dict[str, Answer]) -> None:
    for request_id, one in found.items():
        lora, _, name = request_id.partition("/")
        verdict = family.references[None if lora == "None" else lora].compare(PROMPTS[name], one)
        assert verdict.flips == ()
        assert verdict.max_delta < 1e-3
        assert len(one.tokens) == MAX_TOKENS


@pytest.mark.parametrize("max_batch_tokens", [32, 512])
def test_base_and_adapters_in_one_batch(family: Family, max_batch_tokens: int) -> None:
    loras = {name: str(path) for name, path in family.adapters.items()}
    core = core_of(family.folder, loras=loras, max_batch_tokens=max_batch_tokens, max_num_seqs=32)
    assert core.info.loras == ("all", "some")
    requests = [
        asked(lora, name, prompt) for name, prompt in PROMPTS.items() for lora in (None, "all", "some")
    ]
    first, again = answers(core, *requests), answers(core, *requests)
    assert_equal(family, first)
    assert_equal(family, again)
    assert all(again[request.request_id].cached for request in requests if len(request.token_ids) > 16)
    told = {lora: first[f"{lora}/p4"].tokens for lora in (None, "all", "some")}
    assert told[None] != told["all"] != told["some"] != told[None], "the adapters change nothing"


def test_another_scale(family: Family, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "rs", family.base, seed=5, use_rslora=True, lora_alpha=3)
    core = core_of(family.folder, loras={"rs": str(path)})
    verdict = merged(family.base, path, scale=3 / 4**0.5).compare(
        PROMPT, answer(core, asked("rs", "p4", PROMPT))
    )
    assert verdict.flips == ()
    assert 0 < verdict.max_delta < 1e-3


def test_blocks_are_not_shared_across_adapters(family: Family) -> None:
    core = core_of(family.folder, loras={name: str(path) for name, path in family.adapters.items()})
    for lora in (None, "all", "some"):
        assert core.capabilities.match(asked(lora, "p4", PROMPT)) == 0
        assert answer(core, asked(lora, "p4", PROMPT)).cached == 0
    for lora in (None, "all", "some"):
        assert answer(core, asked(lora, "p4", PROMPT)).cached == (len(PROMPT) - 1) // 16 * 16
    seen = [each for run in core.capabilities.kv_contents() for each in run.sequence_hashes]
    assert len(seen) == len(set(seen)), "hashes that routers see are salted as well"


def test_the_same_weights_under_two_names_are_two_adapters(family: Family) -> None:
    path = str(family.adapters["all"])
    core = core_of(family.folder, loras={"x": path, "y": path}, block_size=2, kv_blocks=60)
    digests = core.capabilities.loras()
    assert digests["x"] != digests["y"], "or one key would have two names in the eyes of routers"
    drive = Drive(core, [asked(lora, name, prompt) for name, prompt in PROMPTS.items() for lora in "xy"])
    while core.has_work:
        drive.step()
        core.scheduler.check_integrity()
    for name in PROMPTS:
        assert drive.choices[f"x/{name}", 0].tokens == drive.choices[f"y/{name}", 0].tokens


def test_an_adapter_can_come_and_go_while_others_run(family: Family) -> None:
    core = core_of(family.folder)
    drive = Drive(core, [asked(None, "p3", PROMPTS["p3"])])
    drive.step()
    core.capabilities.load_lora("all", str(family.adapters["all"]))
    core.capabilities.load_lora("some", str(family.adapters["some"]))
    assert list(core.capabilities.loras()) == ["all", "some"]
    for lora in ("all", "some"):
        drive.submit(asked(lora, "p4", PROMPT))
    drive.step()
    drive.submit(asked("all", "p2", PROMPTS["p2"]))  # has not started when its adapter goes
    core.capabilities.unload_lora("all")
    core.scheduler.check_integrity()
    assert list(core.capabilities.loras()) == ["some"]
    found = drive.finish()
    assert drive.failed.keys() == {"all/p4", "all/p2"}
    assert drive.failed["all/p4"].code == EngineFailed.code
    assert "'all'" in drive.failed["all/p4"].message
    assert_equal(family, {name: one for name, one in found.items() if not name.startswith("all")})
    with pytest.raises(NotFound, match="some"):
        core.submit(asked("all", "p4", PROMPT))
    with pytest.raises(NotFound):
        core.capabilities.unload_lora("all")
    assert_at_rest(core)


def test_a_name_is_not_taken_over_and_serves_no_blocks_of_who_had_it(family: Family) -> None:
    core = core_of(family.folder, loras={"x": str(family.adapters["all"])})
    answer(core, asked("x", "p4", PROMPT))
    core.capabilities.load_lora("x", str(family.adapters["all"]))  # the same: nothing to do
    with pytest.raises(InvalidRequest, match="other weights"):
        core.capabilities.load_lora("x", str(family.adapters["some"]))
    assert answer(core, asked("x", "p4", PROMPT)).cached
    core.capabilities.unload_lora("x")
    core.capabilities.load_lora("x", str(family.adapters["some"]))
    found = answer(core, asked("x", "p4", PROMPT))
    assert found.cached == 0
    assert family.references["some"].compare(PROMPT, found).flips == ()


def with_tensors(folder: Path, change: Any) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def with_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


_FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
BROKEN = {
    "no file": lambda folder: (folder / "adapter_config.json").unlink(),
    "no json": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "no tensors": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 64),
    "dora": lambda folder: with_config(folder, use_dora=True),
    "bias": lambda folder: with_config(folder, bias="all"),
    "rank 0": lambda folder: with_config(folder, r=0),
    "rank pattern": lambda folder: with_config(folder, rank_pattern={"q_proj": 2}),
    "another kind": lambda folder: with_config(folder, peft_type="IA3"),
    "half a pair": lambda folder: with_tensors(folder, lambda tensors: tensors.pop(f"{_FIRST}A.weight")),
    "another model": lambda folder: with_tensors(
        folder, lambda tensors: tensors.update({f"{_FIRST}B.weight": torch.zeros(7, 4)})
    ),
    "another rank": lambda folder: with_config(folder, r=8),
    "one dimension": lambda folder: with_tensors(
        folder, lambda tensors: tensors.update({f"{_FIRST}A.weight": torch.zeros(4)})
    ),
    "three dimensions": lambda folder: with_tensors(
        folder, lambda tensors: tensors.update({f"{_FIRST}A.weight": torch.zeros(4, 64, 1)})
    ),
    "another layer": lambda folder: with_tensors(
        folder,
        lambda tensors: tensors.update(
            {
                f"{_FIRST.replace('.0.', '.9.')}A.weight": torch.zeros(4, 64),
                f"{_FIRST.replace('.0.', '.9.')}B.weight": torch.zeros(64, 4),
            }
        ),
    ),
    "embeddings": lambda folder: with_tensors(
        folder,
        lambda tensors: tensors.update(
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 4)}
        ),
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_no_adapter_of_the_model_is_refused_in_one_line(
    family: Family, tmp_path: Path, fault: str
) -> None:
    path = write_adapter(tmp_path / "adapter", family.base)
    BROKEN[fault](path)
    with pytest.raises(ConfigError) as refused:
        core_of(family.folder, loras={"x": str(path)})
    assert "\n" not in refused.value.message
    assert str(path) in refused.value.message
    core = core_of(family.folder)
    with pytest.raises(InvalidRequest):
        core.capabilities.load_lora("x", str(path))
    assert core.capabilities.loras() == {}
