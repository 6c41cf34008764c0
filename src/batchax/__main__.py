"""``python -m batchax`` is the command `batchax`."""

import sys

from batchax.command import main

sys.exit(main())
