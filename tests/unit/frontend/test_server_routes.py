"""The routes that describe the server, slashes at the end of paths, and what 404s say."""

from __future__ import annotations

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, ScriptedEngine, sim
from tests.unit.frontend.serving import served

from kvolt.testing import run_virtual
from kvolt.version import __version__


def test_the_server_names_itself_and_its_routes() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.ask("/version")).json == {"version": __version__}
        server = (await edge.ask("/")).json
        assert (server["name"], server["version"]) == ("kvolt", __version__)
        assert (await edge.ask(server["docs"])).status == (await edge.ask(server["openapi"])).status == 200
        documented = (await edge.ask("/openapi.json")).json["paths"]
        routes = {tuple(route.split(" ")) for route in server["routes"]}
        assert ("POST", "/v1/chat/completions") in routes
        operations = {(method.upper(), path) for path, methods in documented.items() for method in methods}
        assert operations <= routes

    served(body)


def test_ping_is_empty_and_follows_readiness() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            assert (await edge.ask("/ping")).status == 503
            await lab.worker("w0")
            await edge.ready()
            for method in ("GET", "POST"):
                answer = await edge.ask("/ping", method=method)
                assert (answer.status, answer.body) == (200, b"")

    run_virtual(scenario)


@pytest.mark.parametrize("slashes", ["/", "//"])
def test_a_slash_at_the_end_changes_nothing(slashes: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.ask(f"/v1/models{slashes}")).json["object"] == "list"
        assert (await edge.ask(f"/v1/models/{MODEL}{slashes}")).json["id"] == MODEL
        assert (await edge.ask(f"/v1/models/{MODEL}/ready{slashes}?x=1")).json["ready"] is True
        completed = await edge.ask(
            f"/v1/completions{slashes}", {"model": MODEL, "prompt": "a", "max_tokens": 1}
        )
        assert completed.status == 200
        assert (await edge.ask(f"/v1/completions{slashes}")).status == 405

    served(body)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions"),
        ("/models", "did you mean /v1/models?"),
        ("/helth", "did you mean /health?"),
        ("/doc/", "did you mean /docs?"),
        ("/v1/embeddings", "unknown path /v1/embeddings; embeddings are not available over HTTP yet"),
        ("/v1/responses/", "the Responses API is not available yet; use /v1/chat/completions"),
        ("/admin.php", 'unknown path /admin.php"'),
        ("/" + "v1/models" * 2000, "unknown path /v1/models"),
        ("/%00%0d%0a", 'unknown path /%00%0d%0a"'),
    ],
)
def test_an_unknown_path_names_those_that_are_like_it(path: str, expected: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.ask(path)
        assert answer.status == 404
        assert expected in answer.body.decode()
        assert len(answer.body) < 500

    served(body)


def test_an_unknown_model_names_the_models_there_are() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            models = [f"model-{number:02}" for number in range(11)]
            for name in models:
                await lab.worker(name, sim(model=name) if name != models[0] else ScriptedEngine(name))
            await edge.ready(*models)
            for path, body in (
                ("/v1/models/nobody", None),
                ("/tokenize", {"model": "nobody", "prompt": "a"}),
            ):
                message = (await edge.ask(path, body)).json["error"]["message"]
                assert message == (
                    "the model 'nobody' does not exist; known: model-00, model-01, model-02, model-03, model-04, "
                    "model-05, model-06, model-07 and 3 more"
                )
            long = await edge.chat(model="x" * 1000)
            assert (long.status, len(long.body) < 700) == (404, True)

    run_virtual(scenario)
