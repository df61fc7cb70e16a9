"""The model of one rank: transformer, projections, adapters, and attention on CPUs and GPUs."""
