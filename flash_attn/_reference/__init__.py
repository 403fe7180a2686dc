"""Every op in plain torch. It runs where there is no kernel, and tests compare the kernels with it.

There is a module, or a folder, for each family of ops in flash_attn/_ops, under the same name; attention/ is that of
_ops/flash_attn.py. The functions take their arguments in the order of the ops. Modules here import only torch, its
private names and each other, and register nothing.
"""
