"""These files run under Triton's interpreter: tests/backends/test_triton.py starts them."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
