"""Exceptions by which vLLM refuses a request or a setting."""

from __future__ import annotations


def refusals() -> tuple[type[Exception], ...]:
    """Exception types to catch; vLLM's own do not derive from ValueError."""
    from vllm.exceptions import VLLMClientError

    return (VLLMClientError, ValueError, TypeError)
