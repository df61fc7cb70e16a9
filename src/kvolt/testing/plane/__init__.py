"""Conformance suite of the request plane."""
