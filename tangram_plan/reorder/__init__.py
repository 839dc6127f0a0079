"""Rewrite a checkpoint so that the KV heads of each layer stand in the order of a plan.

A KV head takes its whole block along: its rows of k and v, and the rows of q, the columns of o and the sinks of the query
heads that read it. The model computes the same; but a tensor-parallel rank, which owns a run of consecutive heads, now owns
the heads that the plan wants on it.

A permutation leaves every tensor's shape, dtype and place in its file as they were. So files are copied whole and the moved
tensors are then rewritten in place, as bytes: one tensor in memory at a time, any dtype, no torch.
"""

from .checkpoint import reorder_checkpoint

__all__ = ["reorder_checkpoint"]
