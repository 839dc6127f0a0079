"""Scorers: one file each."""
