"""Benchmarks: one file each, reached through `labcore bench`."""
