"""The config tree: every setting, and how its value is loaded."""
