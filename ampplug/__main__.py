"""`python -m ampplug` is the `ampplug` command."""

import sys

from ampplug.cli import main

sys.exit(main())
