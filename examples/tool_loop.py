"""Let a model call Python functions until it can answer.

python examples/tool_loop.py "Is it warm in Rome?"      # needs: pip install openai, and a model for tools:
                                                        # kvolt serve Qwen/Qwen3-0.6B
"""

import json
import os
import sys

from openai import OpenAI


def get_weather(city: str) -> str:
    """Replace it by a call of your service."""
    return f"{city}: 24 degrees, sunny"


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The current weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
MAX_ROUNDS = 5  # a small model may call tools forever

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
messages: list = [{"role": "user", "content": sys.argv[1] if len(sys.argv) > 1 else "Is it warm in Rome?"}]
for _ in range(MAX_ROUNDS):
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=500)
    message = answer.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message)
    for call in message.tool_calls:
        try:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        except (KeyError, TypeError, ValueError) as error:  # the model reads what was wrong and tries again
            result = f"error: {error!r}"
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
else:
    sys.exit(f"no answer after {MAX_ROUNDS} rounds of tool calls")
