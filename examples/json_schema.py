"""Turn text into an object of a schema: the grammar allows no other output, even from a small model.

python examples/json_schema.py "The soup was cold, but the staff were lovely."
# needs: pip install openai, and a running `kvolt serve` (the simulated engine has no grammars)
"""

import os
import sys
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    """Bounded fields: without bounds a small model may never end a string."""

    mood: Literal["good", "mixed", "bad"]
    stars: Annotated[int, Field(ge=1, le=5)]
    topics: Annotated[list[Literal["food", "staff", "price"]], Field(min_length=1, max_length=3)]


text = sys.argv[1] if len(sys.argv) > 1 else "The soup was cold, but the staff were lovely."
client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": f"Summarize this review as JSON: {text}"}],
    response_format=Review,  # the same as response_format={"type": "json_schema", ...} without the SDK's help
    temperature=0,
    max_tokens=500,
)
review = answer.choices[0].message.parsed
assert review is not None, "the answer was cut off: raise max_tokens"
print(f"mood={review.mood} stars={review.stars} topics={','.join(review.topics)}")
