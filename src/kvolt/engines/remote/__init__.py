"""An OpenAI server that already runs, as an engine: attached over HTTP, not replaced.

engine          the contract: what is asked, what came of it, load
http_client     connections that are used again, answers as they come
events          server-sent events out of bytes
dialect         what engine and server say to each other; vllm_dialect and sglang_dialect have the words
server          what a server says of itself: its kind, its model, its blocks
figures         its load, from its metrics
watch           whether it is there
refusals        what a server's status codes mean to us
"""

from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.engine import RemoteEngine

__all__ = ["RemoteArguments", "RemoteEngine"]
