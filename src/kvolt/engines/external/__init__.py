"""What adapters of external engines share: requests in the words of the engine, answers as step outputs."""
