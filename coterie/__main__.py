"""`python -m coterie`: the command line from a bare checkout."""

from __future__ import annotations

import sys

from coterie.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
