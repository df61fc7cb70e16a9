"""The simulated engine: real scheduling and blocks, times from a step model, answers by script."""
