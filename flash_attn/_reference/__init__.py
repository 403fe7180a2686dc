"""Every op in plain torch: what runs where there is no kernel, and what kernels are compared with.

A module here has the ops' own argument orders, imports torch and its siblings alone, and registers nothing.
"""
