"""What computes: the engine contract, the engines, and the worker that puts one behind an endpoint."""
