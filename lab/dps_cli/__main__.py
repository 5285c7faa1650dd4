"""`python -m dps_cli` runs `dps`."""

from dps_cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
