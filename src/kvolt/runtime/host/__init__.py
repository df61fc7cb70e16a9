"""The machine below a process: cores, memory limits, environment, directories."""
