"""Every op in plain torch. It runs where there is no kernel, and tests compare the kernels with it.

The functions take their arguments in the order of the ops. Modules here import only torch, its private names and
each other, and register nothing.
"""
