"""AsyncLLM: a model in this process, for code on an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self, Unpack

from kvolt.api.local_server import EngineChoice, LocalServer
from kvolt.api.results import RequestOutput
from kvolt.api.sampling_params import DEFAULT, ChatOptions, Message, Params, Prompt, list_prompts


class AsyncLLM:
    """A model in this process whose answers stream on the running event loop.

        async with AsyncLLM("smollm2-135m") as llm:
            async for part in llm.generate("The capital of France is"):
                print(part.outputs[0].text, end="")

    Model and arguments are those of `LLM`. Requests of several tasks run concurrently. Leaving the loop, cancelling the
    task or closing the iterator cancels the request, and the engine frees its blocks. A loop that is left keeps the
    iterator until it is garbage; if your code holds a reference to it, use `contextlib.aclosing`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: str = "auto",
        devices: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        self._server = LocalServer(EngineChoice(model, engine, devices, arguments))

    async def start(self) -> Self:
        """Load the model; `async with` does the same. It can be started once."""
        await self._server.start()
        return self

    async def close(self) -> None:
        """End all requests and the engine. Idempotent."""
        await self._server.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, sampling_params: Params = DEFAULT, *, lora: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a text or token ids. Each part has what is new: join their texts for the whole output."""
        return self._server.stream(self._server.completion(prompt, sampling_params, lora, stream=True))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params = DEFAULT,
        *,
        lora: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, rendered by the model's chat template. Parts as of `generate`."""
        return self._server.stream(self._server.chat(messages, sampling_params, options, lora, stream=True))

    async def embed(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """One vector of unit length per prompt. Unsupported if the engine does not compute embeddings."""
        return await self._server.embed(list_prompts(prompts), lambda: None)
