"""Linear layers, MLPs, norms and activations: modules and functions with a kernel each."""

from flash_attn import _removed

__getattr__ = _removed.getattr_of(__name__, {})
