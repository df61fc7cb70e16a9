"""Values and pure rules: tokens, hashes, wire types, errors. No I/O, no clock, no environment."""
