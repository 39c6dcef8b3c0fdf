"""`python -m autotune` is the command `autotune`."""

import sys

from autotune.front.cli import main

sys.exit(main())
