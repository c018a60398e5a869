"""The folder `interpreted` is for the process that test_interpreted.py starts."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
