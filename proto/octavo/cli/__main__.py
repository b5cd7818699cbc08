"""`python -m octavo.cli`, for a place where the `octavo` script is not on the PATH."""

import sys

from octavo.cli import main

sys.exit(main())
