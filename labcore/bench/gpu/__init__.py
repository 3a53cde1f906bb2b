"""Measurements on an NVIDIA GPU."""
