"""When `kvolt serve` says that it is ready, and what it says is missing."""

from __future__ import annotations

import pytest

from kvolt.cli.health import Served
from kvolt.cli.serve.readiness import is_ready, missing, models_text
from kvolt.runtime.config.settings import Settings, WorkerSettings

SPLIT = (
    WorkerSettings(name="prefill", model="m", role="prefill", count=2),
    WorkerSettings(name="decode", model="m", role="decode", count=2),
)
TWO_MODELS = (WorkerSettings(name="a", model="a", count=2), WorkerSettings(name="b", model="b"))


def config(*workers: WorkerSettings) -> Settings:
    return Settings(workers=list(workers))


@pytest.mark.parametrize(
    ("workers", "models", "with_all", "with_each"),
    [
        (SPLIT, {"m": {"prefill": 2, "decode": 2}}, True, True),
        (SPLIT, {"m": {"prefill": 1, "decode": 2}}, False, True),
        (SPLIT, {"m": {"prefill": 0, "decode": 4}}, False, False),
        (SPLIT, {"m": {"prefill": 0, "decode": 2}}, False, False),
        (TWO_MODELS, {"a": {"aggregated": 2}, "b": {"aggregated": 1}}, True, True),
        (TWO_MODELS, {"a": {"aggregated": 1}, "b": {"aggregated": 1}}, False, True),
        (TWO_MODELS, {"a": {"aggregated": 3}}, False, False),
        ((), {"others": {"aggregated": 1}}, True, True),
        ((SPLIT[0], TWO_MODELS[0]), {"a": {"aggregated": 2}}, True, True),
        ((WorkerSettings(model="m", count=0), *SPLIT), {"m": {"prefill": 2, "decode": 2}}, True, True),
        ((WorkerSettings(model="m", per_process=3),), {"m": {"aggregated": 2}}, False, True),
    ],
)
def test_every_role_and_every_model_is_reached(
    workers: tuple[WorkerSettings, ...], models: Served, with_all: bool, with_each: bool
) -> None:
    given = config(*workers)
    assert is_ready(given, models, every_worker=True) is with_all
    assert is_ready(given, models, every_worker=False) is with_each


@pytest.mark.parametrize(
    ("workers", "models", "words"),
    [
        (SPLIT, None, "the frontend does not respond"),
        (SPLIT, {}, "no worker has registered a model yet"),
        (SPLIT[:1], {}, "(only prefill)"),
        (SPLIT, {"m": {"decode": 2, "prefill": 0}}, "no prefill worker is reachable yet"),
        (TWO_MODELS, {"a": {"aggregated": 2}}, "not every model is reachable yet"),
        ((), {}, "no worker has joined yet"),
    ],
)
def test_what_is_missing(workers: tuple[WorkerSettings, ...], models: Served | None, words: str) -> None:
    assert words in missing(config(*workers), models)


def test_models_and_all_their_workers_are_named() -> None:
    models = {"m": {"prefill": 1, "decode": 2}, "n": {"aggregated": 1}}
    assert models_text(models) == "m (3 workers), n (1 worker)"
