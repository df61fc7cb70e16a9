"""Process runtime: discovery, request and event planes, leases, tasks, clock, configuration, supervisor."""
