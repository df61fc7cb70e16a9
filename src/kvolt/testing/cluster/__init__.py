"""A cluster in one process under virtual time, with seeded faults."""
