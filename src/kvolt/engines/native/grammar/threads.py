"""CompilingThreads: where grammars are compiled, beside the engine's steps.

Owns the threads and the compiler that they share. The first of them makes it: that imports a library and reads a
tokenizer, which takes seconds, and most engines never need it. So this module imports neither. Knows no requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvolt.core.request import Grammar

if TYPE_CHECKING:
    from kvolt.engines.native.grammar.compiler import CompiledGrammar, GrammarCompiler

MAX_COMPILING = 2
"""At once: more would take the cores from the steps."""


class CompilingThreads:
    """See the module."""

    def __init__(self, make: Callable[[], GrammarCompiler]) -> None:
        self._make = make
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_COMPILING, "grammar")
        self.compiler: GrammarCompiler | None = None
        """None until one was needed and made."""

    def kept(self, grammar: Grammar) -> CompiledGrammar | None:
        """The grammar if it was compiled before and is still here; does not wait for those that are compiled now."""
        return None if self.compiler is None else self.compiler.kept(grammar)

    def start(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Errors as of `GrammarCompiler.compile`, and of making one. Cancelled before its turn, it costs nothing."""
        return self._threads.submit(self._compile, grammar)

    def close(self) -> None:
        """What is under way goes on to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._making:
            if self.compiler is None:
                self.compiler = self._make()
        return self.compiler.compile(grammar)
