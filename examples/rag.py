"""Answer a question from your own text: the nearest paragraphs by `LLM.embed`, then a chat with them in the prompt.

python examples/rag.py notes.txt "When is the meeting?" [MODEL]     # MODEL: default smollm2-135m, on the native engine
"""

import math
import sys
from pathlib import Path

from kvolt import LLM, SamplingParams

NUM_PASSAGES, MAX_CHARS = 3, 1000

file, question = sys.argv[1], sys.argv[2]
model = sys.argv[3] if len(sys.argv) > 3 else "smollm2-135m"
paragraphs = [
    each.strip()[:MAX_CHARS] for each in Path(file).read_text("utf-8").split("\n\n") if each.strip()
]


def mean_of(vectors: list[list[float]]) -> list[float]:
    return [math.fsum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def similarity(one: list[float], other: list[float], mean: list[float]) -> float:
    """Cosine of both vectors without what all texts have in common, which is most of them for a chat model."""
    a = [x - m for x, m in zip(one, mean, strict=True)]
    b = [x - m for x, m in zip(other, mean, strict=True)]
    return sum(map(float.__mul__, a, b)) / ((math.hypot(*a) * math.hypot(*b)) or 1.0)


with LLM(model) as llm:
    # Embed once and store the vectors for a larger text: a vector database is a table of them with a fast search.
    *vectors, query = llm.embed([*paragraphs, question])
    mean = mean_of(vectors)
    scores = [similarity(query, vector, mean) for vector in vectors]
    nearest = sorted(range(len(paragraphs)), key=scores.__getitem__, reverse=True)[:NUM_PASSAGES]
    passages = [paragraphs[place] for place in sorted(nearest)]  # in the order of the text
    prompt = "Answer from this text:\n\n" + "\n\n".join(passages) + f"\n\nQuestion: {question}"
    [result] = llm.chat([{"role": "user", "content": prompt}], SamplingParams(max_tokens=100, temperature=0))

for place in nearest:
    print(f"{scores[place]:5.2f}  {paragraphs[place].splitlines()[0][:80]}")
print(f"\n{result.outputs[0].text}")
