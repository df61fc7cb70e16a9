"""OpenAI's formats at the edge: requests and their checks, generation options, errors, answers."""
