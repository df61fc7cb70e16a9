"""kvolt serves large language models across many machines.

The Python API is imported on first use: `import kvolt` itself loads neither an engine nor a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvolt.version import __version__

if TYPE_CHECKING:
    from kvolt.api.async_llm import AsyncLLM
    from kvolt.api.client import Client
    from kvolt.api.llm import LLM
    from kvolt.api.results import CompletionOutput, Logprob, RequestOutput
    from kvolt.api.sampling_params import SamplingParams
    from kvolt.core.errors import KvoltError

__all__ = [
    "LLM",
    "AsyncLLM",
    "Client",
    "CompletionOutput",
    "KvoltError",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_MODULES = {
    "AsyncLLM": "kvolt.api.async_llm",
    "Client": "kvolt.api.client",
    "CompletionOutput": "kvolt.api.results",
    "KvoltError": "kvolt.core.errors",
    "LLM": "kvolt.api.llm",
    "Logprob": "kvolt.api.results",
    "RequestOutput": "kvolt.api.results",
    "SamplingParams": "kvolt.api.sampling_params",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'kvolt' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return __all__
