"""Moving the bytes of blocks between memories: this process, others of the host, other hosts, devices."""
