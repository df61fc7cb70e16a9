"""The simulated engine: real scheduling and blocks, times from a latency model, answers by script."""
