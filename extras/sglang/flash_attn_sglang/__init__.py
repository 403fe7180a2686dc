"""A backend of SGLang, `flash_attn`, computed by this project's `flash_attn`.

SGLang finds `register` by its group of entry points `sglang.srt.plugins` and runs it in each of its processes before
it reads its arguments. `flash_attn_sglang.backend` is the backend; `flash_attn_sglang.interface` has the two functions
that SGLang's loader of FlashAttention-3 wants.
"""

import os
from typing import Any

__version__ = "2.8.3.post101"

__all__ = ["NAME", "register"]

NAME = "flash_attn"
_FA3 = "sglang.kernels.ops.attention.flash_attention_v3"


def register() -> None:
    """Make `--attention-backend flash_attn` known to SGLang, also among its deterministic backends if `flash_attn` has
    levels of batch invariance. With FLASH_ATTN_SGLANG_FA3=1, SGLang's `fa3` also calls this package's functions.

    Raises:
        ImportError: SGLang is not installed, or has no registry of attention backends where this one looks for it.
        ValueError: FLASH_ATTN_SGLANG_FA3 is neither 0 nor 1.
    """
    import flash_attn

    asked = os.environ.get("FLASH_ATTN_SGLANG_FA3", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"FLASH_ATTN_SGLANG_FA3 must be 0 or 1, found {asked!r}")
    try:
        from sglang.srt import server_args
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    except ImportError as error:
        raise ImportError(
            f"flash_attn_sglang needs an SGLang that has sglang.srt.layers.attention.attention_registry, found: {error}"
        ) from error
    if ATTENTION_BACKENDS.get(NAME) is not _make:
        register_attention_backend(NAME)(_make)
        server_args.add_attention_backend_choices([NAME])
        if hasattr(flash_attn, "set_batch_invariant"):
            server_args.add_deterministic_attention_backend_choices([NAME])
            server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    if asked == "1":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(f"{_FA3}._load_fa3_kernels", _functions, HookType.REPLACE)


def _make(runner: Any) -> Any:
    from flash_attn_sglang.backend import FlashAttentionBackend

    return FlashAttentionBackend(runner)


def _functions() -> dict[str, Any]:
    """The two functions that SGLang's loader of FlashAttention-3 returns, from this package."""
    from flash_attn_sglang import interface

    return {name: getattr(interface, name) for name in interface.__all__}
