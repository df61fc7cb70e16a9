"""The native engine in the worker's process, and the process in which its core runs."""
