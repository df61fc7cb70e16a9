"""Endpoints: calling one, serving one, keeping its registration."""
