"""A folder of safetensors: the same weights as transformers loads, mapped and not copied; each fault one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import CHAT_TEMPLATE, tokenizer_json
from kvolt.models.checkpoint import SafetensorsFolder, open_checkpoint
from kvolt.models.config import ARCHITECTURES
from kvolt.models.weights import check_shapes, expected_shapes
from kvolt.testing.tiny_models import tiny_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def edit(path: Path, **fields: Any) -> None:
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(document | fields))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Weights with some replaced or, for None, left out."""
    weights = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in changes.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        *((name, {}) for name in ARCHITECTURES),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_every_weight_equals_the_one_that_transformers_loads(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", architecture, num_shards=2, num_hidden_layers=2, **fields)
    checkpoint = open_checkpoint(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    tied = set() if not checkpoint.config.tie_embeddings else {"lm_head.weight"}
    assert set(checkpoint.names()) == set(theirs) - tied
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), theirs[name]), name


def mapped_file(tensor: torch.Tensor) -> str:
    """The file whose mapping a tensor's memory lies in; empty for memory of its own."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in span.split("-"))
        if start <= at < end:
            return name if name.startswith("/") else ""
    return ""


def test_tensors_are_views_of_the_mapped_file(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    for name in checkpoint.names():
        assert mapped_file(checkpoint.tensor(name)) == str(made / "model.safetensors"), name
        assert mapped_file(checkpoint.tensor(name, torch.float32)) == str(made / "model.safetensors")
    assert mapped_file(torch.zeros(1 << 20)) == ""


def test_a_tensor_in_another_type(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    name = "model.norm.weight"
    assert torch.equal(checkpoint.tensor(name, torch.bfloat16), checkpoint.tensor(name).to(torch.bfloat16))


def test_the_stored_type_is_the_config_s_or_the_weights_own(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", torch_dtype="bfloat16")
    assert open_checkpoint(folder).config.torch_dtype == "bfloat16"
    edit(folder / "config.json", torch_dtype=None)
    assert open_checkpoint(folder).config.torch_dtype == "bfloat16"
    assert open_checkpoint(folder).tensor("lm_head.weight").dtype == torch.bfloat16


def test_shards_hold_what_one_file_holds(made: Path, tmp_path: Path) -> None:
    sharded = open_checkpoint(tiny_checkpoint(tmp_path / "sharded", num_shards=3))
    whole = open_checkpoint(made)
    assert sharded.names() == whole.names()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    assert all(torch.equal(sharded.tensor(name), whole.tensor(name)) for name in whole.names())


def test_a_head_beside_tied_embeddings_and_old_frequencies_are_passed_over(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert "lm_head.weight" not in open_checkpoint(folder).names()


def test_the_hash_follows_every_byte_of_the_weights_and_the_shape_of_the_kv(
    folder: Path, tmp_path: Path
) -> None:
    first = open_checkpoint(folder).weights_hash
    elsewhere = Path(shutil.copytree(folder, tmp_path / "another_name"))
    assert open_checkpoint(elsewhere).weights_hash == first
    assert len(first) == 32

    edit(elsewhere / "generation_config.json", eos_token_id=[1, 2])
    edit(elsewhere / "config.json", max_position_embeddings=1024)
    assert open_checkpoint(elsewhere).weights_hash == first, "neither changes a block's KV"

    edit(elsewhere / "config.json", rope_theta=20000.0)
    assert open_checkpoint(elsewhere).weights_hash != first

    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert open_checkpoint(folder).weights_hash != first


def test_weights_are_hashed_where_no_cores_can_be_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    first = open_checkpoint(folder).weights_hash
    monkeypatch.delattr(os, "sched_getaffinity")
    assert open_checkpoint(folder).weights_hash == first


def test_the_hash_reads_past_its_first_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.models.weights._HASH_PIECE_BYTES", 1 << 16)
    first = open_checkpoint(folder).weights_hash
    weights = bytearray((folder / "model.safetensors").read_bytes())
    assert len(weights) > 1 << 17
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert open_checkpoint(folder).weights_hash != first


def test_ends_come_from_generation_config_first_and_the_tokenizer_s_own_leads(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=1, bos_token_id=0)
    edit(folder / "generation_config.json", eos_token_id=[0, 1, 2])
    config = open_checkpoint(folder).config
    assert config.eos_token_ids == (2, 0, 1)
    assert config.bos_token_id is None, "the tokenizer says that it has none"

    edit(folder / "tokenizer_config.json", bos_token={"content": "<|endoftext|>", "lstrip": False})
    assert open_checkpoint(folder).config.bos_token_id == 0

    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    config = open_checkpoint(folder).config
    assert (config.eos_token_ids, config.bos_token_id) == ((1,), 0)

    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token="<|im_start|>")
    assert open_checkpoint(folder).config.eos_token_ids == (1,)


def test_a_template_has_three_places(folder: Path) -> None:
    assert open_checkpoint(folder).chat_template == CHAT_TEMPLATE
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=several)
    assert open_checkpoint(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("{{ own }}")
    assert open_checkpoint(folder).chat_template == "{{ own }}"
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert open_checkpoint(folder).chat_template == ""


def test_generation_defaults_of_a_folder(folder: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "max_length": 20}
    edit(folder / "generation_config.json", do_sample=True, **values)
    assert open_checkpoint(folder).generation_defaults == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    edit(folder / "generation_config.json", top_k=0)
    assert "top_k" not in open_checkpoint(folder).generation_defaults
    edit(folder / "generation_config.json", do_sample=False)
    assert open_checkpoint(folder).generation_defaults == {"repetition_penalty": 1.05}


def test_a_missing_tensor_is_named_with_their_number(folder: Path) -> None:
    rewrite(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "lacks 1 of 30 tensors: model.layers.1.mlp.up_proj.weight" in refusal(folder).message
    rewrite(folder, **{"model.embed_tokens.weight": None, "lm_head.weight": None})
    assert "lacks 3 of 30 tensors: model.embed_tokens.weight and 2 more" in refusal(folder).message


def test_a_wrong_shape_is_named_with_what_was_expected(folder: Path) -> None:
    rewrite(folder, **{"model.layers.2.self_attn.k_proj.weight": torch.zeros(64, 64)})
    message = refusal(folder).message
    assert "model.layers.2.self_attn.k_proj.weight has the shape [64, 64] instead of [32, 64]" in message


def test_a_tensor_without_a_use_is_an_error(folder: Path) -> None:
    rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    message = refusal(folder).message
    assert "does not use: model.layers.0.self_attn.q_proj.bias" in message


def test_weights_of_another_type_are_refused(folder: Path) -> None:
    rewrite(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    assert "model.norm.weight is stored as I8" in refusal(folder).message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    error = refusal(folder)
    assert f"has no {name}" in error.message
    assert error.fields["remedy"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "has no model-00002-of-00002.safetensors" in refusal(folder).message


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_shards=2)
    edit(folder / "model.safetensors.index.json", weight_map={"lm_head.weight": "../model.safetensors"})
    assert "'../model.safetensors', which is outside the folder" in refusal(folder).message


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_cut_weight_file_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    error = refusal(folder)
    assert "model.safetensors cannot be read as safetensors" in error.message
    assert error.fields["remedy"] == "download the model again"


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_damaged_json_is_named_by_its_file(folder: Path, name: str) -> None:
    (folder / name).write_text('{"eos_token_id": ')
    assert f"{name} cannot be used" in refusal(folder).message


def test_a_file_that_cannot_be_read_is_an_error_of_its_own(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    assert "generation_config.json cannot be read" in refusal(folder).message


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing").message


def test_what_the_config_refuses_is_said_before_anything_of_the_weights(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    (folder / "model.safetensors").unlink()
    assert "quantized (gptq)" in refusal(folder).message


def test_a_checkpoint_serves_a_shorter_context(made: Path) -> None:
    assert open_checkpoint(made, 64).config.context_length == 64


def test_the_table_of_tensors_counts_every_flag(made: Path) -> None:
    config = open_checkpoint(made).config
    every = msgspec.structs.replace(config, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    shapes = expected_shapes(every)
    assert len(shapes) == 3 + every.num_layers * (9 + 3 + 1 + 3 + 2)
    assert shapes["model.layers.2.self_attn.k_norm.weight"] == (16,)
    assert shapes["model.layers.2.mlp.down_proj.bias"] == (64,)
    assert check_shapes(every, shapes, "here") == tuple(shapes)


def test_the_tokenizer_is_the_folder_s(made: Path) -> None:
    assert SafetensorsFolder(made).tokenizer_json == tokenizer_json()
