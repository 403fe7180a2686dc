"""Modules: multi-head attention, MLPs, embeddings, blocks."""

from flash_attn import _removed

__getattr__ = _removed.getattr_of(__name__, {})
