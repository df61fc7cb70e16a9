"""The load generator: when to ask, what to ask, a lean client, what was measured, and how it is told.

`schedules`, `workloads`, `bodies`, `http_reader`, `sse`, `answer`, `histogram`, `sla`, `sample`, `tally`, `compare` and
`svg` are pure; `client` and `runner` drive them over the Network and Clock ports.
"""
