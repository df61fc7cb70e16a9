"""OpenAI's formats: requests, validation, generation options, errors, responses."""
