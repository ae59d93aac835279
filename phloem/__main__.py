"""`python -m phloem`: what torchrun starts, which knows modules and no commands."""

from __future__ import annotations

import sys

from phloem.cli.main import main

sys.exit(main())
