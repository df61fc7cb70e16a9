"""The engine contract, the registry of engines, and what engines of kvolt share."""
