"""Several streams of one model on an event loop: print the first answer that is done, and cancel the others.

python examples/async_streams.py [MODEL]      # default smollm2-135m; sim-tiny needs no torch
"""

import asyncio
import sys

from kvolt import AsyncLLM, SamplingParams

QUESTIONS = {"Name a colour.": 10, "Name ten cities.": 100, "Tell a long story about a dragon.": 1000}
"""With the most tokens that each answer may have."""


async def answer(llm: AsyncLLM, question: str, max_tokens: int) -> tuple[str, str]:
    """The question with its answer."""
    messages = [{"role": "user", "content": question}]
    text = ""
    async for part in llm.chat(messages, SamplingParams(max_tokens=max_tokens)):
        text += part.outputs[0].text  # what is new, as soon as the engine has computed it
    return question, text


async def main() -> None:
    async with AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m") as llm:
        streams = [asyncio.create_task(answer(llm, *each)) for each in QUESTIONS.items()]
        done, pending = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        for stream in pending:
            stream.cancel()  # the engine stops computing it, and frees its KV blocks
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in done:
            question, text = stream.result()
            print(f"first: {question} {text.strip()}")
        print(f"cancelled: {len(pending)}")


asyncio.run(main())
