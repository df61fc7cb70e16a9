"""Stands in for the one module of vLLM that SGLang takes its rotary embedding from on a CPU."""
