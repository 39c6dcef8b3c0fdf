"""`python -m autotune` is the command `autotune`."""

import sys

from autotune.cli import main

sys.exit(main())
