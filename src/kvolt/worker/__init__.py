"""The process around an engine: streams, KV events, handoffs, onboarding from tiers, health and metrics."""
