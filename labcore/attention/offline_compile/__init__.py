"""Ahead-of-time compilation of every kernel for six GPU generations, without a GPU, and analysis of the machine code."""
