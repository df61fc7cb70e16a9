"""llama.cpp in the seat: its C interface, all sequences of a batch in one context, greedy by argmax.

Prompts go in as many at a time as its logical batch holds; then one call decodes a token of every sequence.
usage: on_llama.py FILE.gguf THREADS [variant=icelake]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import llama_library
import numpy as np
import seat

_MAX_SEQUENCES = 64
_TOKENS_PER_SEQUENCE = 1024
_LOGICAL_BATCH = 2048
"""Its default; a prompt has to fit."""


class Piece(NamedTuple):
    """Tokens of one sequence in one call; the last one's logits are wanted."""

    sequence: int
    start: int
    tokens: Sequence[int]


class Context:
    """A loaded model and room for all sequences."""

    def __init__(self, path: str, threads: int, variant: str | None) -> None:
        self._llama = llama = llama_library.load(Path(sys.prefix) / "llama.cpp", variant)
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not model:
            raise SystemExit(f"cannot load {path}")
        params = llama.llama_context_default_params()
        params.n_ctx = _MAX_SEQUENCES * _TOKENS_PER_SEQUENCE
        params.n_seq_max = _MAX_SEQUENCES
        params.n_batch = _LOGICAL_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit("no room for the context")
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(_LOGICAL_BATCH, 0, 1)

    def system(self) -> str:
        return str(self._llama.llama_print_system_info().decode().strip())

    def forget(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), False)

    def next_tokens(self, pieces: Sequence[Piece]) -> list[int]:
        """Compute the pieces in one call; the likeliest token after each."""
        batch, row, last_rows = self._batch, 0, []
        for piece in pieces:
            for offset, token in enumerate(piece.tokens):
                batch.token[row] = token
                batch.pos[row] = piece.start + offset
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = piece.sequence
                batch.logits[row] = offset == len(piece.tokens) - 1
                row += 1
            last_rows.append(row - 1)
        batch.n_tokens = row
        code = self._llama.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode: {code}")
        return [self._likeliest(row) for row in last_rows]

    def _likeliest(self, row: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


def main(path: str, threads: int, variant: str | None = None) -> None:
    context = Context(path, threads, variant)

    def generate(prompts: Sequence[Sequence[int]], num_output: int) -> seat.Answers:
        context.forget()
        answers = seat.Answers(len(prompts))
        waiting = [Piece(sequence, 0, prompt) for sequence, prompt in enumerate(prompts)]
        while waiting:
            now: list[Piece] = []
            while waiting and sum(len(p.tokens) for p in now) + len(waiting[0].tokens) <= _LOGICAL_BATCH:
                now.append(waiting.pop(0))
            _tell(answers, now, context.next_tokens(now))
        for number in range(1, num_output):
            now = [
                Piece(sequence, len(prompt) + number - 1, answers.tokens[sequence][-1:])
                for sequence, prompt in enumerate(prompts)
            ]
            _tell(answers, now, context.next_tokens(now))
        return answers

    seat.serve({"llama.cpp": "0.5.0", "kernels": context.system()}, generate)


def _tell(answers: seat.Answers, pieces: Sequence[Piece], tokens: Sequence[int]) -> None:
    at = answers.now()
    for piece, token in zip(pieces, tokens, strict=True):
        answers.add(piece.sequence, [token], at)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), **seat.options())
