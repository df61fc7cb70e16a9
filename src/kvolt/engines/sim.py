"""The simulated engine: real scheduling and streaming, time from a step model, no computing.

Continuous batching with chunked prefill under a token budget; a request is admitted when all the
blocks it can ever need are free, so that it never has to be preempted. What an answer says is in
`sim_script`.

Of the sampling parameters `seed`, `n`, `allowed_token_ids`, `logprobs` and `prompt_logprobs` are honoured, the
last two with figures that are made up. Temperature, top_p, top_k, min_p, penalties and logit_bias are taken
and change nothing: there are no logits. There are no grammars either; those are refused.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.delta import Delta, StepOutput, Usage
from kvolt.core.errors import InvalidRequest, Overloaded, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Request
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sim_model import SimModel, foreign_model, generated_model, read_template, sim_card
from kvolt.engines.sim_script import Choice, Speaker

_AtLeastOne = Annotated[int, Meta(ge=1)]


class SimArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "sim"`. The default step model is a mid-size GPU with an 8B model."""

    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Times faster than the step model says."""
    block_size: _AtLeastOne = 16
    kv_blocks: _AtLeastOne = 16_384
    context_length: _AtLeastOne = 32_768
    max_num_seqs: _AtLeastOne = 256
    max_waiting: _AtLeastOne = 4096
    max_batch_tokens: _AtLeastOne = 8192
    latency: LatencyModel = LatencyModel(
        base_s=0.006,
        prefill_token_s=0.00006,
        prefill_context_s=2e-9,
        batch_s=0.00005,
        context_token_s=2e-8,
    )
    say: str | None = None
    """The text of every answer; None for words."""
    words: _AtLeastOne | None = None
    """After so many words an answer ends by itself, where EOS may end it; None for words until max_tokens."""
    say_from_prompt: bool = False
    """Let a prompt say what its answer is: `<say>one text<or/>another for the next choice</say>`, the last
    such span. Other prompts are answered as ever."""
    chat_template: str | None = None
    """A Jinja template, or the path of one, in place of the sim model's own."""
    tool_parser: str | None = None
    """Goes into the card; None lets the frontend find it by the template. So does the next."""
    reasoning_parser: str | None = None
    model_tokenizer: str | None = None
    """Path of a tokenizer.json in place of the generated one. Answers are then made of its first words."""
    eos_token: str | None = None
    """The token of `model_tokenizer` that ends an answer. It has to be told: a tokenizer.json does not say."""
    bos_token: str | None = None
    """The token of `model_tokenizer` that chat templates know as `bos_token`."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, str) and not _is_unicode(value):
                raise ValueError(f"{name} is not valid Unicode")
        if self.model_tokenizer is None and (self.eos_token is not None or self.bos_token is not None):
            raise ValueError("eos_token and bos_token are those of a model_tokenizer: name one")
        if self.model_tokenizer is not None and self.eos_token is None:
            raise ValueError("a model_tokenizer needs its eos_token, for example eos_token = '<|im_end|>'")


@dataclass(slots=True)
class _Sequence:
    """A request on its way through the engine; its choices advance together and end apart."""

    request: Request
    num_blocks: int
    choices: list[Choice]
    """Those that have not ended."""
    is_plain: bool
    """Whether its tokens, but for the first and the last, are all that there is to tell."""
    num_prefilled: int = 0
    num_generated: int = 0

    @property
    def num_prompt(self) -> int:
        """What has to be prefilled: the prompt, and what was generated before a move to this engine."""
        return len(self.request.token_ids) + len(self.request.resume)


class SimEngine:
    """See the module. One task reads `steps`; `submit` and `abort` are called from the same loop."""

    def __init__(self, spec: EngineSpec, arguments: SimArguments) -> None:
        self._spec = spec
        self._arguments = arguments
        model = _model(spec.model, arguments)
        self._card = model.card
        self._speaker = Speaker(model, arguments.say, arguments.say_from_prompt, arguments.words)
        self._waiting: OrderedDict[RequestId, _Sequence] = OrderedDict()
        self._running: dict[RequestId, _Sequence] = {}
        self._free_blocks = arguments.kv_blocks
        self._work = asyncio.Event()
        self._closed = False
        self._plain_ids: tuple[RequestId, ...] = ()

    @property
    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> EngineInfo:
        arguments = self._arguments
        return EngineInfo(
            engine="sim",
            role=self._spec.role,
            model=self._card.name,
            card=card_hash(self._card),
            block_size=arguments.block_size,
            capacity=Capacity(
                max_num_seqs=arguments.max_num_seqs,
                max_batch_tokens=arguments.max_batch_tokens,
                kv_total_blocks=arguments.kv_blocks,
            ),
            latency=arguments.latency,
        )

    def submit(self, request: Request) -> None:
        if request.grammar is not None:
            raise Unsupported("the sim engine has no grammars", feature="grammar")
        _check(request)
        if request.request_id in self._running or request.request_id in self._waiting:
            raise InvalidRequest(f"request {request.request_id} is here already", param="request_id")
        num_tokens = len(request.token_ids) + request.stop.max_tokens
        if num_tokens > self._arguments.context_length:
            raise InvalidRequest(
                f"{len(request.token_ids)} prompt tokens and {request.stop.max_tokens} new ones are over the "
                f"context of {self._arguments.context_length}",
                param="max_tokens",
            )
        num_blocks = -(-num_tokens // self._arguments.block_size) * request.sampling.num_choices
        if num_blocks > self._arguments.kv_blocks:
            raise InvalidRequest(f"the request needs {num_blocks} blocks, more than there are", param="n")
        if len(self._waiting) >= self._arguments.max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=self._arguments.max_waiting)
        is_plain = request.sampling.num_choices == 1 and request.sampling.logprobs is None
        self._waiting[request.request_id] = _Sequence(
            request, num_blocks, self._speaker.choices(request), is_plain
        )
        self._work.set()

    def abort(self, request_id: RequestId) -> None:
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._free_blocks += sequence.num_blocks
        else:
            self._waiting.pop(request_id, None)

    async def withdraw(self, request_id: RequestId) -> bool:
        return self._waiting.pop(request_id, None) is not None

    async def steps(self) -> AsyncIterator[StepOutput]:
        while not self._closed:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
                continue
            self._admit()
            prefilled, decoding, step = self._plan()
            time_s = self._arguments.latency.step_s(step) / self._arguments.speed
            await asyncio.sleep(time_s)
            yield self._finish_step(prefilled, decoding, msgspec.structs.replace(step, time_s=time_s))

    async def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._running.clear()
        self._free_blocks = self._arguments.kv_blocks
        self._work.set()

    # ---

    def _admit(self) -> None:
        """First come, first served: a large request at the head waits for its blocks, and all behind it."""
        while self._waiting and len(self._running) < self._arguments.max_num_seqs:
            request_id, sequence = next(iter(self._waiting.items()))
            if sequence.num_blocks > self._free_blocks:
                return
            self._free_blocks -= sequence.num_blocks
            self._running[request_id] = self._waiting.pop(request_id)

    def _plan(self) -> tuple[dict[RequestId, int], list[RequestId], StepStats]:
        """What this step does: chunk sizes by request, requests that decode, and the step's cost terms."""
        budget = self._arguments.max_batch_tokens
        decoding: list[RequestId] = []
        prefilled: dict[RequestId, int] = {}
        batch = context_tokens = prefill_context = 0
        for request_id, sequence in self._running.items():
            if sequence.num_prefilled >= sequence.num_prompt:
                decoding.append(request_id)
                batch += len(sequence.choices)
                context_tokens += (sequence.num_prompt + sequence.num_generated) * len(sequence.choices)
        budget -= batch
        for request_id, sequence in self._running.items():
            chunk = min(sequence.num_prompt - sequence.num_prefilled, budget)
            if chunk > 0:
                budget -= chunk
                prefilled[request_id] = chunk
                prefill_context += chunk * (sequence.num_prefilled + chunk)
        step = StepStats(
            batch=batch,
            prefill_tokens=sum(prefilled.values()),
            prefill_context=prefill_context,
            context_tokens=context_tokens,
        )
        return prefilled, decoding, step

    def _finish_step(
        self, prefilled: dict[RequestId, int], decoding: list[RequestId], step: StepStats
    ) -> StepOutput:
        deltas: list[tuple[RequestId, Delta]] = []
        plain: list[RequestId] = []
        tokens: list[int] = []
        for request_id, chunk in prefilled.items():
            sequence = self._running.get(request_id)  # None: aborted during the step
            if sequence is not None:
                sequence.num_prefilled += chunk
                if sequence.num_prefilled >= sequence.num_prompt:
                    self._generate(sequence, deltas)
        for request_id in decoding:
            sequence = self._running.get(request_id)
            if sequence is None:
                continue
            position = len(sequence.request.resume) + sequence.num_generated
            if sequence.is_plain and position + 1 < sequence.request.stop.max_tokens:
                choice = sequence.choices[0]
                token = choice.token(position)
                if token not in choice.enders:
                    sequence.num_generated += 1
                    plain.append(request_id)
                    tokens.append(token)
                    continue
            self._generate(sequence, deltas)
        plain_ids = tuple(plain)
        if plain_ids == self._plain_ids:
            plain_ids = self._plain_ids  # the same object: the worker need not look up its members again
        self._plain_ids = plain_ids
        return StepOutput(
            tuple(deltas), load=self._load(step), plain_ids=plain_ids, plain_tokens=tuple(tokens)
        )

    def _generate(self, sequence: _Sequence, deltas: list[tuple[RequestId, Delta]]) -> None:
        """A first or last token, or those of several choices: what is more than a plain token."""
        request = sequence.request
        position = len(request.resume) + sequence.num_generated
        sequence.num_generated += 1
        first = sequence.num_generated == 1
        going_on: list[Choice] = []
        for choice in sequence.choices:
            token = choice.token(position)
            end = choice.end(position, token)
            delta = Delta(
                token_ids=(token,),
                index=choice.index,
                finish=end.finish if end else None,
                logprobs=choice.logprobs(position, token),
                prompt_logprobs=self._speaker.prompt_logprobs(request)
                if first and not choice.index
                else None,
                cached_tokens=0 if first else None,
                usage=Usage(len(request.token_ids), position + 1) if end else None,
                stop_reason=end.stop_reason if end else None,
            )
            deltas.append((request.request_id, delta))
            if end is None:
                going_on.append(choice)
        sequence.choices = going_on
        if not going_on:
            del self._running[request.request_id]
            self._free_blocks += sequence.num_blocks

    def _load(self, step: StepStats) -> WorkerLoad:
        return WorkerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_blocks=self._arguments.kv_blocks - self._free_blocks,
            kv_total_blocks=self._arguments.kv_blocks,
            step=step,
        )


def _check(request: Request) -> None:
    """What no engine could end: nothing to start from, or nothing left to say."""
    if not request.token_ids:
        raise InvalidRequest("the prompt is empty", param="token_ids")
    if request.sampling.num_choices < 1:
        raise InvalidRequest("at least one choice must be asked for", param="n")
    if request.stop.max_tokens < 1:
        raise InvalidRequest("at least one token must be asked for", param="max_tokens")
    if len(request.resume) >= request.stop.max_tokens:
        raise InvalidRequest("all tokens asked for have been generated already", param="resume")


def _model(name: str, arguments: SimArguments) -> SimModel:
    card = msgspec.structs.replace(
        sim_card(name, arguments.context_length, arguments.block_size),
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
    )
    if arguments.chat_template is not None:
        card = msgspec.structs.replace(card, chat_template=read_template(arguments.chat_template))
    if arguments.model_tokenizer is None or arguments.eos_token is None:
        return generated_model(card)
    return foreign_model(card, arguments.model_tokenizer, arguments.eos_token, arguments.bos_token)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
