"""Paged attention: the KV store, the geometry of a step, and the backends that attend over block tables."""
