"""Paged attention: attention metadata, the backends that attend over block tables, and their Triton kernels."""
