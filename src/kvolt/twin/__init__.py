"""Digital twin: the real runtime, workers and journeys on virtual time, with simulated engines."""
