"""Decoders of other engines' KV events, and their translation to kvolt's. Pure.

Sockets, sequence numbers and replays belong to the adapters.
"""
