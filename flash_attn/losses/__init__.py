"""Losses: cross entropy of logits, and of hidden states without the logits in memory."""

from flash_attn import _removed

__getattr__ = _removed.getattr_of(__name__, {})
