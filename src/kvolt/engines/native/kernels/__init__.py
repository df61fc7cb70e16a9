"""The operations of a step in their fast forms: Triton's on a GPU, C on a CPU."""
