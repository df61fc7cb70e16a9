"""Load generator: schedules, workloads, measurements and reports.

`runner` sends the requests with `runtime.http.client`; the other modules are pure.
"""
