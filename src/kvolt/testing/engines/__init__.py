"""Conformance suite of the engine contract."""
