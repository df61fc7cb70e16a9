"""Conformance suite of the Discovery port."""
