"""Endpoints: addresses, calling an endpoint, serving one, keeping its registration."""
