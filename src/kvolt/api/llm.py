"""LLM: a model in this process, for scripts and notebooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, Unpack, cast

from kvolt.api.local_server import EngineChoice, LocalServer
from kvolt.api.loop_thread import LoopThread
from kvolt.api.progress import progress as show_progress
from kvolt.api.results import RequestOutput
from kvolt.api.sampling_params import (
    DEFAULT,
    ChatOptions,
    Message,
    Params,
    Prompt,
    checked_params,
    list_prompts,
)
from kvolt.core.errors import InvalidRequest
from kvolt.frontend.tokenization.preprocess import Processor
from kvolt.runtime.http.protocol import HttpRequest


class LLM:
    """A model in this process. Generates for many prompts at once, batched by the engine.

        with LLM("smollm2-135m") as llm:
            for output in llm.generate(["Hello", "The capital of France is"], SamplingParams(max_tokens=20)):
                print(output.prompt, output.outputs[0].text)

    `model` is what `kvolt serve` accepts: a built-in name (the default is smollm2-135m), a Hugging Face name, a folder
    with a checkpoint, a GGUF file, or sim-NAME for the simulated engine. Further keyword arguments are engine arguments
    (`kvolt engine list native`), for example `dtype="float32"`. `devices` selects GPUs by index or UUID.

    The engine gets as many requests as it can run, and as many again; the others wait here. Errors are those of the
    HTTP API, as exceptions of `kvolt.core.errors`. Ctrl-C cancels a call and leaves the model usable. The event loop
    runs in a thread of its own, so that it also works in a notebook. Methods may be called from several threads.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: str = "auto",
        devices: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        choice = EngineChoice(model, engine, devices, arguments)
        self._loop = LoopThread(f"LLM {choice.model}")
        self._server = LocalServer(choice)
        # Also at interpreter exit, and when the object is garbage.
        self._close = weakref.finalize(self, _close, self._loop, self._server)
        try:
            self._loop.run(self._server.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engine and its process. Idempotent; leaving a `with` block does the same."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = DEFAULT,
        *,
        lora: str | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or several; a prompt is a text or token ids. Results have the order of the prompts.

        `sampling_params`: for all prompts, or one for each. `lora`: the adapter to use. `progress`: show it on stderr.
        """
        several = list_prompts(prompts)
        params = _one_for_each(sampling_params, len(several))
        return self._answer_all(
            [
                partial(self._server.completion, *each, lora, False)
                for each in zip(several, params, strict=True)
            ],
            progress,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] = DEFAULT,
        *,
        lora: str | None = None,
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered by the model's chat template. Other arguments as of `generate`.

        A conversation is a list of messages as in OpenAI's API, such as `{"role": "user", "content": "Hello"}`.
        """
        several = _list_conversations(messages)
        params = _one_for_each(sampling_params, len(several))
        return self._answer_all(
            [
                partial(self._server.chat, *each, options, lora, False)
                for each in zip(several, params, strict=True)
            ],
            progress,
        )

    def embed(self, prompts: Prompt | Sequence[Prompt], *, progress: bool = True) -> list[list[float]]:
        """One vector of unit length per prompt. Unsupported if the engine does not compute embeddings."""
        several = list_prompts(prompts)
        with show_progress("prompts", len(several), quiet=not progress) as step:
            return self._loop.run(self._server.embed(several, step))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode` and `decode`."""
        return Tokenizer(self._server.model.processor, self._loop)

    def _answer_all(
        self, requests: Sequence[Callable[[], HttpRequest]], progress: bool
    ) -> list[RequestOutput]:
        with show_progress("prompts", len(requests), quiet=not progress) as step:
            return self._loop.run(self._server.answer_all(requests, step))


class Tokenizer:
    """Tokenizer of an `LLM`; encodes as `generate` does."""

    def __init__(self, processor: Processor, loop: LoopThread) -> None:
        self._processor = processor
        self._loop = loop

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        [token_ids] = self._loop.run(self._processor.encode([text], "text", add_special_tokens))
        return list(token_ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._processor.vocabulary.decode(token_ids, skip_special_tokens)


def _close(loop: LoopThread, server: LocalServer) -> None:
    loop.close(server.close())


def _list_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    are_several = isinstance(messages, Sequence) and all(
        isinstance(each, Sequence) and not isinstance(each, str) for each in messages
    )
    return cast("Sequence[Sequence[Message]]", messages if are_several else [messages])


def _one_for_each(params: Params | Sequence[Params], count: int) -> Sequence[Params]:
    if isinstance(params, str) or not isinstance(params, Sequence):
        return [checked_params(params)] * count
    if len(params) != count:
        raise InvalidRequest(
            f"{len(params)} sampling parameters for {count} prompts: pass one, or one for each",
            param="sampling_params",
        )
    return params
