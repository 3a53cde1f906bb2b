"""Requests to measure with: traces, synthetic workloads. Imports no torch."""
