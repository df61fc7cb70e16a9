"""The engine as the worker sees it, and the process in which its core runs."""
