"""``python -m specmodel``: the command line."""

import sys

from specmodel.cli import main

sys.exit(main())
