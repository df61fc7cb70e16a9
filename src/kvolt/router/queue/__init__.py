"""Requests that wait while no worker has room."""
