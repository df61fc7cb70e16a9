"""From a model's text to content, reasoning and tool calls, as it comes."""
