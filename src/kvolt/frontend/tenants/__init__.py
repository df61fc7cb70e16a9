"""API keys and tenants: who may call the HTTP API, within which limits. docs/api-keys.md is the user's page.

`records` has the data, `store` the port with its in-memory and `key_file` its file implementation, `live_keys` the
copy that a frontend looks keys up in, `access` the check of a request, `limits` the decisions, `budgets` the
requests that are charged, `leases` (the limiter), `lease_pool`, `local_budget` and `shared_budgets` the limits over all
frontends, `usage` the counts.
"""
