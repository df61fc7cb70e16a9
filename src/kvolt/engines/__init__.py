"""The engine contract, the registry of engines, and modules shared by engines."""
