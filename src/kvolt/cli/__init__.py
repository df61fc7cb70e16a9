"""The `kvolt` command: one file per verb."""
