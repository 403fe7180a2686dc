"""What others import from this package by its name."""

import importlib
import pkgutil

import flash_attn


def public_modules():
    """The modules that others import from: within a package that lists its names in __all__, those that list theirs."""
    names = [module.name for module in pkgutil.walk_packages(flash_attn.__path__[:1], "flash_attn.")]
    public = [name for name in names if not any(part.startswith("_") for part in name.split("."))]
    listing = tuple(name for name in public if hasattr(importlib.import_module(name), "__all__"))
    within = tuple(f"{name}." for name in listing)
    return [name for name in public if name in listing or not name.startswith(within)]


def public_names(module):
    """The names of a module that are in its __all__ or, without that, are defined there."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])
