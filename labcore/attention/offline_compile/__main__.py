"""`python -m labcore.attention.offline_compile`: see report.py."""

import sys

from labcore.attention.offline_compile.compile_gate import main

if __name__ == "__main__":
    sys.exit(main())
