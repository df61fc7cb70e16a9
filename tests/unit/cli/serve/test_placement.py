"""Which worker gets which GPU, and which engine a model's name means."""

from __future__ import annotations

import pytest

from kvolt.cli.serve.placement import device_flags, place, visible_gpus
from kvolt.cli.worker.command import check_engine, with_model
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.settings import WorkerSettings


def group(**fields: object) -> WorkerSettings:
    return WorkerSettings(model="m", **fields)  # type: ignore[arg-type]


def test_one_gpu_for_each_rank_in_order() -> None:
    groups = [group(count=2), group(name="b", args={"tensor_parallel": 2}), group(name="c", engine="sim")]
    assert place(groups, "01234") == [("0",), ("1",), ("2", "3"), ()]


def test_named_devices_are_nobody_elses() -> None:
    groups = [group(count=1), group(name="b", count=2, devices=["0", "3"])]
    assert place(groups, "0123") == [("1",), ("0",), ("3",)]


def test_a_device_of_the_arguments_is_a_named_one() -> None:
    groups = [group(), group(name="b", args={"device": "cuda:0"})]
    assert place(groups, ("GPU-a", "GPU-b")) == [("GPU-b",), ("GPU-a",)]
    assert place([group(devices=["cuda:1"])], "01") == [("1",)]
    with pytest.raises(ConfigError, match="more than the 1 available"):
        place([group(count=2, devices=["0"])], ())


def test_a_name_that_only_begins_like_a_simulated_one_takes_a_gpu() -> None:
    assert place([WorkerSettings(model="simple/model"), WorkerSettings(model="sim-x")], "0") == [("0",), ()]


def test_a_worker_sees_only_its_own_gpus() -> None:
    assert device_flags(("2", "GPU-abc")) == (("--devices", "0,1"), {"CUDA_VISIBLE_DEVICES": "2,GPU-abc"})
    assert device_flags(()) == ((), {})


def test_without_gpus_all_is_on_the_cpu() -> None:
    assert place([group(count=2, args={"tensor_parallel": 2})], ()) == [(), ()]
    assert place([group(args={"device": "cpu"})], "0") == [()]


@pytest.mark.parametrize(
    "groups",
    [
        [group(count=3)],
        [group(args={"tensor_parallel": 3})],
        [group(count=2, devices=["0"])],
        [group(devices=["0", "1"]), group(name="b")],
    ],
)
def test_too_few_gpus_are_told_before_anything_starts(groups: list[WorkerSettings]) -> None:
    with pytest.raises(ConfigError, match="more than the") as caught:
        place(groups, "01")
    assert caught.value.fields["remedy"]


def test_visible_gpus_are_those_of_the_environment() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}) == ("2", "GPU-abc")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_a_models_name_means_its_engine() -> None:
    assert check_engine(WorkerSettings())[0] == "native"
    assert check_engine(WorkerSettings(model="sim-x")) == ("sim", {"words": 120})
    assert check_engine(WorkerSettings(model="sim-x", engine="sim")) == ("sim", {})
    assert check_engine(WorkerSettings(model="m", engine="sim", args={"speed": 2}))[1] == {"speed": 2}


def test_a_name_that_can_be_no_models_is_told_before_anything_starts() -> None:
    assert check_engine(WorkerSettings(model="owner/name:Q4_K_M"))[0] == "native", "the hub knows it, or not"
    for name in ("no-such-model", "./no/such/folder", "sim_tiny"):
        with pytest.raises(ConfigError) as caught:
            check_engine(WorkerSettings(model=name))
        assert caught.value.fields["remedy"]
    assert check_engine(WorkerSettings(model="no-such-model", engine="sim"))[0] == "sim"


def test_another_model_takes_no_arguments_along() -> None:
    given = WorkerSettings(model="sim-a", args={"speed": 2.0})
    assert with_model(given, "sim-a").args == {"speed": 2.0}
    assert with_model(given, "sim-a", "sim").args == {"speed": 2.0}
    assert with_model(given, "qwen").args == {}
    assert with_model(given, "sim-a", "native").args == {}
    assert with_model(WorkerSettings(model="m", engine="sim"), "qwen").engine == "auto"
