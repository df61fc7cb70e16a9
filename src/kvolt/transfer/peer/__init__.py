"""The two ends of a connection between agents: messages, reads, offers."""
