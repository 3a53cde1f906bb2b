"""Compiles every kernel for six GPU generations on a machine with no GPU, and reads the machine code."""
