"""A planning compiler for non-uniform KV cache compression in LLM serving."""
