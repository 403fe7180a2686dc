"""Losses: cross entropy of logits; the same and log-probabilities of hidden states, without all logits in memory."""

from flash_attn import _removed

__getattr__ = _removed.getattr_of(__name__, {})
