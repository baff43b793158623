"""Prepares the caller's model for a blueprint: construction, fused modules, tiles."""
