"""An engine of your own: a Markov chain over the characters of a text file. Streams, seeds, `n` and migration work.

kvolt serve README.md --engine examples/engine.py:KIND             # the model is the text file
kvolt engine check examples/engine.py:KIND --model README.md       # run the conformance suite
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.answers import Choice, ChoiceOutput, find_end
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.description import limits_of
from kvolt.engines.external.requests import input_tokens, refuse_extra
from kvolt.engines.registry import EngineKind
from kvolt.engines.wakeup import Wakeup
from kvolt.scheduler.step_plan import Limits

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token for each byte; the next id ends a text
END = len(BYTES)
Chain = dict[tuple[int, ...], Counter[int]]  # what follows the last tokens, and how often


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the Markov engine: `--arg order=3`."""

    order: int = 6
    """Characters that determine the next one"""
    max_num_seqs: int = 256


class Launched(msgspec.Struct, frozen=True):
    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int
    chain: Chain


class MarkovEngine(ExternalEngine[Launched]):
    name, title = "markov", "Markov"
    sampling_fields = frozenset(
        {"temperature", "seed", "num_choices"}
    )  # a worker refuses requests with others

    def __init__(self, spec: EngineSpec, arguments: Arguments) -> None:
        super().__init__()
        self._spec, self._arguments = spec, arguments
        self._choices: dict[str, tuple[Choice, list[int], int]] = {}  # with their tokens and seeds
        self._wakeup = Wakeup()

    async def _launch(self) -> Launched:
        return await self._load(self._train, lambda launched: None)  # in a thread: it may take minutes

    def _train(self) -> Launched:
        tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(BYTES)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        chain: Chain = defaultdict(Counter)
        for paragraph in Path(self._spec.model).read_text("utf-8").split("\n\n"):
            tokens = [*tokenizer.encode(paragraph).ids, END]
            for at, token in enumerate(tokens):
                for length in range(min(at, self._arguments.order) + 1):
                    chain[tuple(tokens[at - length : at])][token] += 1
        card = ModelCard(  # what a frontend needs to know
            name=self._spec.model,
            tokenizer_json=tokenizer.to_str().encode(),
            chat_template="{{ messages[-1].content }}",
            context_length=4096,
            block_size=16,
            eos_token_ids=(END,),
        )
        capacity = Capacity(
            max_num_seqs=self._arguments.max_num_seqs, max_batch_tokens=4096, kv_total_blocks=0
        )
        info = EngineInfo(  # what a router needs to know
            engine=self.name,
            role=Role.AGGREGATED,
            model=card.name,
            card=card_hash(card),
            block_size=card.block_size,
            capacity=capacity,
            kv_events=False,
        )
        return Launched(card, info, limits_of(info, card, max_waiting=1024), END + 1, chain)

    async def _start_tasks(self, running: Launched) -> None:
        self._start_task(lambda: self._run_steps(running.chain), "steps")

    def _check_supported(self, request: Request, running: Launched) -> None:
        refuse_extra(request, self.title)

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        seed = random.getrandbits(32) if request.sampling.seed is None else request.sampling.seed
        for choice in choices:  # the input of a migrated request includes its answer so far
            tokens = input_tokens(request, choice.index)
            self._choices[choice.engine_id] = choice, tokens, seed + choice.index
        self._wakeup.set()

    def _abort_choices(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._choices.pop(engine_id, None)

    async def _run_steps(self, chain: Chain) -> None:
        """One token per step for each running choice. An error here ends the engine, and its requests migrate."""
        while True:
            if not self._choices:
                await self._wakeup.wait()
            self._wakeup.clear()
            for choice, tokens, seed in [*self._choices.values()][: self._arguments.max_num_seqs]:
                token = self._next_token(chain, tokens, seed, choice.request.sampling.temperature)
                tokens.append(token)
                _, finish, stop_reason = find_end(choice, [token], (END,))
                self._answers.add_output(choice, ChoiceOutput((token,), finish, stop_reason))
                if finish is not None:
                    self._abort_choices([choice.engine_id])
            self._step_queue.put(self._answers.take_step(WorkerLoad(len(self._choices))))
            await self._step_queue.wait_for_space()  # the worker may be slower than this loop
            await asyncio.sleep(0)

    def _next_token(self, chain: Chain, tokens: list[int], seed: int, temperature: float) -> int:
        """The longest known context decides; random by seed and position, so that a migrated answer stays the same."""
        contexts = (tuple(tokens[-length:]) for length in range(self._arguments.order, 0, -1))
        followers = next((chain[context] for context in contexts if context in chain), chain[()])
        if temperature == 0:
            return followers.most_common(1)[0][0]
        weights = [count ** (1 / temperature) for count in followers.values()]
        return random.Random(f"{seed}/{len(tokens)}").choices([*followers], weights)[0]


KIND = EngineKind(Arguments, MarkovEngine)
