"""The engine that the rest of the course improves on: contiguous KV cache, static batches."""
