"""Benchmarks: one file each, run by `labcore bench NAME`."""
