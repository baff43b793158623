"""Elementwise updates and other fused passes over flat buffers."""
