"""Example requests and responses of the documentation; a test validates them against their schemas."""

from __future__ import annotations

_USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
CHAT = {"model": "my-model", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHATS = {
    "plain": CHAT,
    "streamed": {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    "sampling": {**CHAT, "temperature": 0.2, "top_p": 0.9, "seed": 7, "stop": ["\n\n"]},
    "tools": {**CHAT, "tools": [_TOOL], "tool_choice": "auto"},
    "extensions": {**CHAT, "nvext": {"extra_fields": ["timing"], "agent_hints": {"osl": 32}}},
}
CHAT_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1700000000,
    "model": "my-model",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
}
COMPLETION = {"model": "my-model", "prompt": "Once upon a time", "max_tokens": 32}
COMPLETIONS = {
    "plain": COMPLETION,
    "streamed": {**COMPLETION, "stream": True},
    "tokens": {"model": "my-model", "prompt": [1, 2, 3], "max_tokens": 8},
}
COMPLETION_ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1700000000,
    "model": "my-model",
    "choices": [{"index": 0, "text": " there was", "logprobs": None, "finish_reason": "length"}],
    "usage": _USAGE,
}
MODEL_ANSWER = {
    "id": "my-model",
    "object": "model",
    "created": 1700000000,
    "owned_by": "kvolt",
    "root": "my-model",
    "parent": None,
}
ADAPTER_ANSWER = {**MODEL_ANSWER, "id": "my-adapter", "parent": "my-model"}
THRESHOLD = {"model": "my-model", "active_decode_blocks_threshold": 0.9}
MODEL_READY = {
    "model": "my-model",
    "ready": True,
    "namespaces": {"default": {"ready": True, "workers": {"aggregated": 2}, "missing": []}},
}
