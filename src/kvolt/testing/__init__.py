"""Shipped to users: a virtual-time loop, an in-memory network, conformance suites for every port."""
