"""Supervisor of the local processes of `kvolt serve`."""
