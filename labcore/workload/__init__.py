"""Workloads: traces, synthetic requests, metrics. Imports no torch."""
