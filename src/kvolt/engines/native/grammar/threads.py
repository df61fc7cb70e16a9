"""CompilingThreads: compiles grammars in threads, concurrently with the engine's steps.

Owns the threads and their shared compiler, which is created on first use, since that imports a library and reads a
tokenizer, which takes seconds. So this module imports neither. Knows no requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvolt.core.request import Grammar
from kvolt.engines.native.setup import MAX_COMPILING

if TYPE_CHECKING:
    from kvolt.engines.native.grammar.compiler import CompiledGrammar, GrammarCompiler


class CompilingThreads:
    """See the module."""

    def __init__(self, create_compiler: Callable[[], GrammarCompiler]) -> None:
        self._create_compiler = create_compiler
        self._create_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_COMPILING, "grammar")
        self.compiler: GrammarCompiler | None = None
        """None until the first grammar."""

    def find_compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        """A compiled grammar in the cache, or None. Does not wait for running compilations."""
        return None if self.compiler is None else self.compiler.find_compiled(grammar)

    def start(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile a grammar. Errors as for `GrammarCompiler` and its `compile`. Cancelling before it runs has
        no cost."""
        return self._threads.submit(self._compile, grammar)

    def close(self) -> None:
        """Stop accepting grammars; running compilations finish."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._create_lock:
            if self.compiler is None:
                self.compiler = self._create_compiler()
        return self.compiler.compile(grammar)
