"""Virtual time: an event loop, a network, and the ports of a process."""
