"""An engine of your own: a Markov chain over the bytes of a text file. Streams, seeds, `n` and migration work.

kvolt serve README.md --engine examples/engine.py:KIND             # the model is the text file
kvolt engine check examples/engine.py:KIND --model README.md       # run the conformance suite
"""

from collections import Counter, defaultdict
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvolt.core.card import ModelCard
from kvolt.engines.external.stepped import RunningSequence, SteppedEngine
from kvolt.engines.registry import EngineKind

BYTES, END = sorted(pre_tokenizers.ByteLevel.alphabet()), 256  # a token for each byte, one that ends a text


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    order: int = 6  # number of bytes that determine the next one: `--arg order=3`


class MarkovEngine(SteppedEngine[Arguments]):
    name, title, vocab_size = "markov", "Markov", END + 1
    sampling_fields = frozenset({"temperature", "seed", "num_choices"})  # requests with others are refused

    def load_model(self) -> ModelCard:
        tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(BYTES)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        self.chain = defaultdict(Counter)  # what follows the last bytes, and how often
        for paragraph in Path(self.spec.model).read_text("utf-8").split("\n\n"):
            tokens = [*tokenizer.encode(paragraph).ids, END]
            for at, token in enumerate(tokens):
                for length in range(min(at, self.arguments.order) + 1):
                    self.chain[tuple(tokens[at - length : at])][token] += 1
        return ModelCard(  # what frontends need to know
            name=self.spec.model,
            tokenizer_json=tokenizer.to_str().encode(),
            chat_template="{{ messages[-1].content }}",
            context_length=4096,
            block_size=16,
            eos_token_ids=(END,),
        )

    def next_tokens(self, batch: list[RunningSequence]) -> list[int]:  # one step
        return [self.next_token(sequence) for sequence in batch]

    def next_token(self, sequence: RunningSequence) -> int:  # the longest context that the text has decides
        contexts = (tuple(sequence.tokens[-length:]) for length in range(self.arguments.order, 0, -1))
        followers = self.chain[next((each for each in contexts if each in self.chain), ())]
        if sequence.sampling.temperature == 0:
            return followers.most_common(1)[0][0]
        weights = [count ** (1 / sequence.sampling.temperature) for count in followers.values()]
        return sequence.random().choices([*followers], weights)[0]


KIND = EngineKind(Arguments, MarkovEngine)
