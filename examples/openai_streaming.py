"""Stream a chat with the OpenAI client, and show which worker answered and how fast.

python examples/openai_streaming.py "What is a KV cache?"      # needs: pip install openai, and a running `kvolt serve`
"""

import os
import sys

from openai import OpenAI

question = sys.argv[1] if len(sys.argv) > 1 else "What is a KV cache?"
# kvolt has no authentication: the client only insists on some key.
client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    max_tokens=200,
    stream=True,
    stream_options={"include_usage": True},  # the last event has token counts
    extra_body={"nvext": {"extra_fields": ["worker_id", "timing"]}},  # and how the request was served
)
about: dict = {}
with stream:  # leaving the block early closes the connection, and the worker stops computing
    for event in stream:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        about |= (event.model_extra or {}).get("nvext") or {}
        if event.usage is not None:
            cached = event.usage.prompt_tokens_details.cached_tokens
            print(f"\n\nprompt: {event.usage.prompt_tokens} tokens, {cached} of them cached")
            print(f"answer: {event.usage.completion_tokens} tokens of {model}")
print(f"worker: {about['worker_id']['decode_worker_id']}")
print(f"first token after {about['timing']['ttft_ms']:.0f} ms")
