"""`python -m dps_operator`: the same as `dps operator`."""

import sys

from dps_operator.app import main

sys.exit(main(sys.argv[1:]))
