"""`python3 -m sglang.launch_server` in the emulated engine's image is `dps engine`, and says so."""

import sys

from dps_lab.engine.cli import main

if __name__ == "__main__":
    print("This is DPS Router's emulated SGLang server: no model, no GPU.", file=sys.stderr, flush=True)
    raise SystemExit(main(sys.argv[1:]))
