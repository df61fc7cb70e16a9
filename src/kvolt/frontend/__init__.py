"""The HTTP edge: the only place that knows OpenAI formats."""
