"""From a bare machine to an open notebook: what `make lab` and `make test` do, also without make.

    python -m labcore.setup lab          (Windows: py -m labcore.setup lab)

Standard library only, since it runs before anything is installed.
"""
