"""Fifty prompts for a small chat model: short and long, with a beginning in common and without."""

from __future__ import annotations

from tokenizers import Tokenizer

_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_QUESTIONS = (
    "What is the capital of France?",
    "Explain how a refrigerator keeps food cold.",
    "Write a haiku about the sea.",
    "List five uses for a paper clip.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish, German and Italian.",
    "Give me a recipe for pancakes.",
    "What is the difference between a crocodile and an alligator?",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet, and when?",
    "How many legs do seven spiders have?",
    "Suggest three names for a black cat.",
    "What happens when ice melts?",
    "Summarise the story of Cinderella in two sentences.",
    "Is a tomato a fruit or a vegetable?",
    "What should I pack for a week in the mountains?",
    "Explain compound interest to a child.",
    "Name the planets in order of their distance from the sun.",
    "Write a polite email that declines an invitation.",
    "What is 17 times 23?",
)

_BEGINNINGS = (
    "The",
    "Once upon a time, in a village at the foot of a mountain,",
    "def fibonacci(n):\n    ",
    "The three most important inventions of the nineteenth century were",
    "Dear Sir or Madam,\n\nI am writing to",
    "In physics, entropy is a measure of",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Roses are red, violets are blue,",
    "1, 1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "To make bread you need flour, water, salt and",
    "Photosynthesis is the process by which plants",
    "It was a dark and stormy night, and the captain had not slept for",
    "<html>\n<head>\n<title>",
    "The history of Rome begins with",
    "A good teacher is someone who",
    "Q: What do bees make?\nA:",
    "import os\nimport sys\n\n",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain",
    "My favourite season is autumn, because",
)

_PASSAGE = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed its two hundred steps "
    "with a can of oil, cleaned the glass, trimmed the wick and lit the lamp. Ships on their way to the harbour "
    "saw it from twenty miles away. In winter, when the waves broke over the pier, he stayed in the tower for days, "
    "read the same four books and wrote down the weather. When the lamp was replaced by an electric one the keeper "
    "was not needed any more, but he came every evening all the same, to see that it was lit. "
)

_TASKS = (
    "Summarise the text in one sentence.",
    "Who is the main character?",
    "What did the keeper do in winter?",
    "How many steps does the tower have?",
    "Write a title for the text.",
    "Continue the story.",
    "Why was the keeper not needed any more?",
    "Translate the first sentence into French.",
    "List the nouns of the first sentence.",
    "What is the mood of the text?",
)


def _chat(text: str, system: str = _SYSTEM) -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def chat_prompts(tokenizer_json: bytes) -> dict[str, tuple[int, ...]]:
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    texts = [_chat(question) for question in _QUESTIONS]
    texts += _BEGINNINGS
    texts += [_chat(f"{_PASSAGE}\n\n{task}") for task in _TASKS]
    assert len(texts) == 50
    return {f"p{number}": tuple(tokenizer.encode(text).ids) for number, text in enumerate(texts)}
