"""HTTP frontend; the only package that knows OpenAI's formats."""
