"""Answers: choices, streams, whole bodies, stop strings."""
