"""`python -m kvolt` is the `kvolt` command."""

from kvolt.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
