"""``python -m hf_paged`` is ``hf-paged``."""

from __future__ import annotations

import sys

from hf_paged.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
