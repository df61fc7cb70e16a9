"""An OpenAI server that already runs, as an engine: attached over HTTP, not replaced.

* engine: the contract; which requests are under way, load, whether the server is there
* exchange: one choice's way to the server and back
* events: answers as they come
* dialect: what engine and server say to each other; vllm_dialect and sglang_dialect have the words
* refusals: what a server's status codes mean to us
* server, card: what a server says of itself; its model's tokenizer and template, which have to be here
* watch, figures: whether it is there, how busy it is
* telling: what a step says of all that
"""

from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.engine import RemoteEngine

__all__ = ["RemoteArguments", "RemoteEngine"]
