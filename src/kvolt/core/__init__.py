"""Data types and pure functions: requests, hashes, wire types, errors. No I/O, clock or environment."""
