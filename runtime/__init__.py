"""Artefact in, tokens out."""

from .engine_args import engine_args

__all__ = ["engine_args"]
