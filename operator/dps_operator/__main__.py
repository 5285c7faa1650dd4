"""`python -m dps_operator`: the operator where the `dps` command, which lives with the gateway, is not installed."""

import sys

from dps_operator.app import main

sys.exit(main(sys.argv[1:]))
