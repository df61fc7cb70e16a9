"""The host of a process: cores, memory limits, environment, directories."""
