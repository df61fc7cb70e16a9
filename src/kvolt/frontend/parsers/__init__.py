"""Incremental parsers of model output: content, reasoning and tool calls."""
