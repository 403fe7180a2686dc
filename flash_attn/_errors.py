"""The errors for bad arguments. Callers and tests of flash-attn, whose checks are C++, expect RuntimeError for all."""


class ArgumentError(ValueError, RuntimeError):
    """An argument has a wrong shape, device or value."""


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument has a wrong type or dtype."""
