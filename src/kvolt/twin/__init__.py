"""The cluster as a model of itself: the real runtime, workers and journeys on virtual time, with simulated engines."""
