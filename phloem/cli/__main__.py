"""`python -m phloem.cli`, for where the script is not on the path."""

from __future__ import annotations

import sys

from phloem.cli.main import main

sys.exit(main())
