"""Adapters of the vllm engine: loaded, used, refused, and gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.vllm.lab import ARGUMENTS, Harness, running, with_args

from kvolt.core.errors import ConfigError, InvalidRequest, NotFound, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.testing.engines.harness import Run

LORAS = with_args(ARGUMENTS, enable_lora=True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "adapter").mkdir()
    return str(tmp_path / "adapter")


def asked(run: Run, name: str, lora: str | None) -> Request:
    return replace(run.request(name, prompt=40), lora=lora)


async def test_an_adapter_is_used_by_who_names_it(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        assert "Lora" in run.info.features
        plain = await run.answer(asked(run, "plain", None))
        await engine.load_lora("poet", path)
        await engine.load_lora("clerk", path)
        assert engine.loras() == ("poet", "clerk")
        poet = await run.answer(asked(run, "poet", "poet"))
        again = await run.answer(asked(run, "again", "poet"))
        assert poet.tokens == again.tokens != plain.tokens
        assert (poet.cached, again.cached) == (0, 32), "blocks are those of an adapter"
        assert [request.lora_request and request.lora_request.lora_int_id for request in core.received] == [
            None,
            1,
            1,
        ]


async def test_one_that_is_not_there_is_refused(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        with pytest.raises(InvalidRequest, match=r"no adapter 'poet' is loaded \(loaded: none\)") as caught:
            run.engine.submit(asked(run, "r", "poet"))
        assert caught.value.fields["param"] == "lora"
        await engine.load_lora("clerk", path)
        with pytest.raises(InvalidRequest, match="loaded: clerk"):
            run.engine.submit(asked(run, "r", "poet"))
        await engine.unload_lora("clerk")
        with pytest.raises(InvalidRequest, match="'clerk'"):
            run.engine.submit(asked(run, "r", "clerk"))
        assert core.received == []


async def test_errors_of_loading(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        with pytest.raises(InvalidRequest, match=r"cannot load the adapter.*No adapter found") as caught:
            await engine.load_lora("poet", "/nowhere")
        assert caught.value.fields["param"] == "path"
        assert engine.loras() == ()
        await engine.load_lora("poet", path)
        with pytest.raises(InvalidRequest, match="loaded already") as caught:
            await engine.load_lora("poet", path)
        assert caught.value.fields["param"] == "name"
        with pytest.raises(NotFound) as missing:
            await engine.unload_lora("nobody")
        assert missing.value.fields == {"kind": "lora", "name": "nobody"}
        assert list(core.loras) == [2], "numbers are not used again"


async def test_vllm_may_just_say_no(model: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        monkeypatch.setattr(core, "_add_lora", lambda adapter: False)
        with pytest.raises(InvalidRequest, match="did not load"):
            await engine.load_lora("poet", path)
        assert engine.loras() == ()


async def test_an_empty_path_is_refused(model: str) -> None:
    """By an assertion of vLLM's."""
    async with running(Harness(model, LORAS)) as (run, _):
        engine: Any = run.engine
        with pytest.raises(InvalidRequest):
            await engine.load_lora("poet", "")


async def test_one_that_goes_and_comes_is_another_one(model: str, path: str) -> None:
    """Blocks of the one before may still bear its number."""
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        await engine.load_lora("poet", path)
        await run.answer(asked(run, "one", "poet"))
        await engine.unload_lora("poet")
        assert core.loras == {}
        await engine.load_lora("poet", path)
        await run.answer(asked(run, "two", "poet"))
        assert [request.lora_request.lora_int_id for request in core.received] == [1, 2]
        paths = [request.lora_request.lora_path for request in core.received]
        assert paths[0] == path
        assert paths[1] != path, "vLLM finds blocks by names and paths"
        assert Path(paths[1]).samefile(path)


async def test_what_comes_from_a_hub_keeps_its_name(
    model: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        monkeypatch.setattr(core, "_add_lora", lambda adapter: paths.append(adapter.lora_path) or True)
        paths: list[str] = []
        for _ in range(2):
            await engine.load_lora("poet", "someone/poet")
            await engine.unload_lora("poet")
        assert paths == ["someone/poet", "someone/poet"]


async def test_running_requests_end_with_it(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        await engine.load_lora("poet", path)
        answer = run.submit(replace(asked(run, "r", "poet"), stop=StopConditions(max_tokens=60)))
        await run.until(lambda: bool(answer.tokens))
        core.pause()
        unloading = asyncio.ensure_future(engine.unload_lora("poet"))
        await asyncio.sleep(0.1)
        assert engine.loras() == ()
        assert list(core.loras) == [1], "taken from who uses it"
        # One that comes by its name in the meantime is not waited for.
        await asyncio.wait_for(asyncio.shield(_loads_and_asks(run, core, path)), 10)
        await run.finish(answer)
        await asyncio.wait_for(unloading, 10)
        assert list(core.loras) == [2]


async def _loads_and_asks(run: Run, core: Any, path: str) -> None:
    engine: Any = run.engine
    loading = asyncio.ensure_future(engine.load_lora("poet", path))
    await asyncio.sleep(0)
    core.go_on()
    await loading
    run.submit(replace(asked(run, "next", "poet"), stop=StopConditions(max_tokens=120, ignore_eos=True)))


async def test_one_that_is_aborted_uses_no_adapter(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        await engine.load_lora("poet", path)
        core.pause()
        answer = run.submit(asked(run, "r", "poet"))
        run.abort(answer)
        await asyncio.wait_for(engine.unload_lora("poet"), 10)
        assert core.loras == {}
        core.go_on()


async def test_two_that_load_one_name_at_once(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        outcomes = await asyncio.gather(
            engine.load_lora("poet", path), engine.load_lora("poet", path), return_exceptions=True
        )
        assert [type(each) for each in outcomes] == [type(None), InvalidRequest]
        assert len(core.loras) == 1


async def test_without_adapters_in_vllm_there_are_none(model: str, path: str) -> None:
    async with running(Harness(model)) as (run, _):
        engine: Any = run.engine
        assert "Lora" not in run.info.features
        with pytest.raises(Unsupported, match="enable_lora"):
            await engine.load_lora("poet", path)
        with pytest.raises(InvalidRequest):
            run.engine.submit(asked(run, "r", "poet"))


async def test_adapters_of_the_configuration_are_there_from_the_start(model: str, path: str) -> None:
    async with running(Harness(model, replace(ARGUMENTS, loras={"poet": path, "clerk": path}))) as (run, _):
        engine: Any = run.engine
        assert engine.loras() == ("poet", "clerk")
        assert (await run.answer(asked(run, "r", "clerk"))).done


async def test_one_of_them_that_cannot_be_loaded_fails_the_start(model: str) -> None:
    engine = Harness(model, replace(ARGUMENTS, loras={"poet": "/nowhere"})).engine()
    with pytest.raises(ConfigError, match="No adapter found"):
        await engine.start()
    await engine.close()


async def test_a_request_id_is_no_adapter(model: str, path: str) -> None:
    """Names go to routers by events; a number of nobody's has none."""
    async with running(Harness(model, LORAS)) as (run, _):
        engine: Any = run.engine
        await engine.load_lora("poet", path)
        assert engine._adapters.name_of(1) == "poet"
        assert engine._adapters.name_of(7) is None
        assert RequestId("poet") not in engine._answers


async def test_one_may_come_again_however_often(model: str, path: str) -> None:
    """A path has 4,095 bytes."""
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        paths = set()
        for _ in range(4100):
            await engine.load_lora("poet", path)
            (adapter,) = core.loras.values()
            paths.add(adapter.lora_path)
            await engine.unload_lora("poet")
        assert len(paths) == 4100
        assert max(len(each) for each in paths) < len(path) + 40
        assert all(Path(each).samefile(path) for each in paths)


@asynccontextmanager
async def unloading_is_given_up(run: Run, core: Any, path: str) -> AsyncIterator[None]:
    """While a request uses the adapter. It ends thereafter. Within: before that is given up."""
    engine: Any = run.engine
    await engine.load_lora("poet", path)
    answer = run.submit(replace(asked(run, "r", "poet"), stop=StopConditions(max_tokens=60)))
    await run.until(lambda: bool(answer.tokens))
    core.pause()
    unloading = asyncio.ensure_future(engine.unload_lora("poet"))
    await asyncio.sleep(0.05)
    yield
    unloading.cancel()
    await asyncio.wait([unloading])
    assert list(core.loras)[:1] == [1]
    core.go_on()
    await run.finish(answer)


async def test_one_whose_unloading_is_given_up_is_as_before(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        async with unloading_is_given_up(run, core, path):
            pass
        assert engine.loras() == ("poet",)
        assert (await run.answer(asked(run, "again", "poet"))).done
        await engine.unload_lora("poet")
        assert core.loras == {}


async def test_one_whose_name_is_anothers_by_then_goes_with_that(model: str, path: str) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine
        async with unloading_is_given_up(run, core, path):
            loading = asyncio.ensure_future(engine.load_lora("poet", path))
            await asyncio.sleep(0)
        await loading
        assert list(core.loras) == [1, 2]
        await engine.unload_lora("poet")
        assert core.loras == {}


async def test_a_removal_that_fails_is_made_with_the_next(
    model: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Harness(model, LORAS)) as (run, core):
        engine: Any = run.engine

        async def failing(number: int) -> bool:
            raise RuntimeError("no")

        await engine.load_lora("poet", path)
        await engine.load_lora("clerk", path)
        with monkeypatch.context() as patched:
            patched.setattr(core, "remove_lora_async", failing)
            with pytest.raises(RuntimeError):
                await engine.unload_lora("poet")
        assert engine.loras() == ("clerk",)
        await engine.unload_lora("clerk")
        assert core.loras == {}
