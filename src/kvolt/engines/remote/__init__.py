"""Adapter for a running vLLM or SGLang server, attached over its HTTP API.

* engine: the contract; requests in flight, load, availability
* exchange: one HTTP call per choice; conversion to step outputs
* dialect, vllm_dialect, sglang_dialect: request and response formats
* refusals: meaning of HTTP status codes
* server, card: properties of the server; tokenizer and template, which must be available locally
* health_watch, server_load: availability and load
"""

from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.engine import RemoteEngine

__all__ = ["RemoteArguments", "RemoteEngine"]
