"""Latency models: fitting one to a step log, its error, and presets by name."""
