"""Bodies of chats and completions, explained by a frontend as they would be routed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
from tests.unit.engines.lab import MODEL, NAMESPACE, Lab, make_request, sim, until
from tests.unit.worker.test_roles import Air, start

from kvolt.core.errors import InvalidRequest, KvoltError, NotFound
from kvolt.core.request import Role
from kvolt.frontend.admin.explain import FRONTEND_EXPLAIN_ENDPOINT, ExplainRoute, RouteExplainer
from kvolt.frontend.models import Models
from kvolt.router.explanation import Explanation
from kvolt.router.registry import find_router
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.testing import run_virtual

_decode = msgspec.msgpack.Decoder(Explanation).decode


def explained(
    body: Callable[[RouteExplainer, Models, Lab], Awaitable[None]], roles: tuple[Role, ...] = ()
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            if roles:
                air = Air()
                for role in roles:
                    await start(lab, air, role)
            else:
                await lab.worker("w0", sim())
            runtime = await lab.runtime("edge")
            models = Models(runtime, NAMESPACE, new_router=find_router("latency"))
            models.start()
            lab._closing.append(models.close)
            await until(lambda: bool(models.ready()))
            explainer = RouteExplainer(models, "edge")
            explainer.register_endpoint(runtime.server)
            await body(explainer, models, lab)

    run_virtual(scenario)


def encoded(**fields: object) -> bytes:
    return msgspec.json.encode(fields)


def test_texts_tokens_and_chats_are_explained() -> None:
    async def body(explainer: RouteExplainer, models: Models, lab: Lab) -> None:
        tokens = await explainer.explain(encoded(model=MODEL, prompt=list(range(5, 45))))
        assert (tokens.prompt_tokens, tokens.num_blocks) == (40, 2)
        text = await explainer.explain(encoded(prompt="hello there, hello"))
        assert text.prompt_tokens > 2
        chat = await explainer.explain(encoded(messages=[{"role": "user", "content": "hello"}]))
        assert chat.prompt_tokens > 2
        assert chat.endpoint == str(models.ready()[0].client.endpoint)
        assert [each.process for each in chat.candidates] == ["w0"]

    explained(body)


def test_prefill_workers_are_explained_with_the_mode() -> None:
    async def body(explainer: RouteExplainer, models: Models, lab: Lab) -> None:
        await until(
            lambda: models.ready()[0].journey_context.prefill_modes.explain(make_request()) is not None
        )
        told = await explainer.explain(encoded(prompt=list(range(5, 405)), max_tokens=50))
        prefill = told.prefill
        assert prefill is not None
        assert {"remote", "local", "prefill_worker"} == set(prefill.mode_costs)
        assert prefill.mode in prefill.mode_costs
        assert [each.process for each in prefill.workers.candidates] == ["prefill"]
        assert [each.process for each in told.candidates] == ["decode"]
        short = await explainer.explain(encoded(prompt=[5, 6, 7]))
        assert short.prefill is not None
        assert (short.prefill.mode, short.prefill.mode_costs) == ("local", {})
        alone = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Explanation)
        assert alone == told

    explained(body, (Role.PREFILL, Role.DECODE))


def test_the_hashes_are_those_of_a_request() -> None:
    async def body(explainer: RouteExplainer, models: Models, lab: Lab) -> None:
        asked = encoded(prompt=list(range(5, 45)), max_tokens=7, nvext={"agent_hints": {"osl": 3}})
        _, request = await explainer._request(asked)
        assert len(request.sequence_hashes) == 2
        assert (request.stop.max_tokens, request.routing.expected_output_tokens) == (7, 3)

    explained(body)


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"nonsense", InvalidRequest, "not a JSON object"),
        (b"[]", InvalidRequest, "not a JSON object"),
        (encoded(model="nope", prompt="x"), NotFound, "nope"),
        (encoded(prompt=["a", "b"]), InvalidRequest, "one prompt"),
        (encoded(prompt=""), InvalidRequest, "prompt"),
        (encoded(messages=3), InvalidRequest, "messages"),
        (encoded(prompt_embeds="AAAA"), InvalidRequest, "embeddings"),
    ],
)
def test_what_cannot_be_explained_is_refused(body: bytes, error: type[KvoltError], words: str) -> None:
    async def refused(explainer: RouteExplainer, models: Models, lab: Lab) -> None:
        with pytest.raises(error, match=words):
            await explainer.explain(body)

    explained(refused)


def test_it_is_asked_over_the_request_plane() -> None:
    async def body(explainer: RouteExplainer, models: Models, lab: Lab) -> None:
        visitor = await lab.runtime("visitor")
        (edge,) = [each for each in lab._runtimes if each.options.name == "edge"]
        address = edge.plane.address
        assert address is not None
        to = Destination(address, FRONTEND_EXPLAIN_ENDPOINT)
        question = ExplainRoute(encoded(prompt="hello"))
        async with await open_stream(visitor.plane, to, question, Deadlines(), _decode) as stream:
            told = await anext(stream)
        assert told.decided_by == "edge"

    explained(body)
