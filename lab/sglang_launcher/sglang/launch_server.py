"""`python3 -m sglang.launch_server` runs `dps engine` in the image of the emulated SGLang server."""

import sys

from dps_local.emulated_sglang.server import main

if __name__ == "__main__":
    print("This is DPS Router's emulated SGLang server: no model, no GPU.", file=sys.stderr, flush=True)
    raise SystemExit(main(sys.argv[1:]))
