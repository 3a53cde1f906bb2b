"""The Triton kernels, and how they are launched. Built in notebook 03."""
