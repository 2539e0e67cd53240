"""Layers that compute in FP8."""
