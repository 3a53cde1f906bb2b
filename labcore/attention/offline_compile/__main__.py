"""`python -m labcore.attention.offline_compile`: see compile_gate.py."""

import sys

from labcore.attention.offline_compile.compile_gate import main

if __name__ == "__main__":
    sys.exit(main())
