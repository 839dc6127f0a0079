"""Artefact in, tokens out."""
