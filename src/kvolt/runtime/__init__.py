"""Discovery, planes, leases, tasks, clock, config, supervisor: what every process stands on."""
