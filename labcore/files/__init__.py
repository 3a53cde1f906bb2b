"""Writing files: whole or not at all, one process at a time, never over a reader's. Standard library only."""
