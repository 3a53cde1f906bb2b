"""The iteration-level scheduler: which request computes how many tokens in a step. Imports no torch."""
