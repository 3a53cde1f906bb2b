"""File output: atomic writes, folder locks, no overwriting of foreign files. Standard library only."""
