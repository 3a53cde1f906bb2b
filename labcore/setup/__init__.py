"""Set up the environment and run the Makefile's commands, also without make.

    python -m labcore.setup lab          (Windows: py -m labcore.setup lab)

Standard library only, because it runs before anything is installed.
"""
