"""Selection of a worker: candidates, cached prefixes, scores, reservations, corrections learned from outcomes."""
