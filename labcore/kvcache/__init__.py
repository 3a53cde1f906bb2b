"""The paged KV cache: block pool, block tables, prefix cache, tensors, and the size of it all."""
