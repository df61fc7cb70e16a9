"""Load generator: schedules, workloads, an HTTP client, measurements and reports.

`schedules`, `workloads`, `bodies`, `http_reader`, `sse`, `answer`, `histogram`, `sla`, `sample`, `tally`, `compare` and
`svg` are pure; `client` and `runner` drive them over the Network and Clock ports.
"""
