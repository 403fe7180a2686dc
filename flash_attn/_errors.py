"""The errors for bad arguments. They are RuntimeErrors too, since the checks in C++ of flash-attn raise these."""


class ArgumentError(ValueError, RuntimeError):
    """An argument has a wrong shape, device or value."""


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument has a wrong type or dtype."""
