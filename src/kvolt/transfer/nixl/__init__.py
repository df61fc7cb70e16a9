"""Transfers by NIXL. Imported only where NIXL is installed and used."""
