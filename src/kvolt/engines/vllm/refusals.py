"""What vLLM raises where it is asked for something that it will not do: its own errors, or a plain ValueError."""

from __future__ import annotations


def refusals() -> tuple[type[Exception], ...]:
    """To be caught. vLLM's own are no ValueErrors."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError)
