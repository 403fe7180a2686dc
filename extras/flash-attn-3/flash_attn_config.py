"""What this build of FlashAttention-3's names can do, as flags that tests and packages read to leave cases out."""

_SUPPORTED = (
    "BACKWARD SPLIT PAGEDKV APPENDKV LOCAL SOFTCAP PACKGQA FP16 VARLEN CLUSTER "
    "HDIM64 HDIM96 HDIM128 HDIM192 HDIM256 SM8x"
).split()

CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{name}": False for name in _SUPPORTED},
        "FLASHATTENTION_DISABLE_FP8": True,
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
    }
}


def show() -> None:
    """Print the flags, one a line."""
    for name, value in CONFIG["build_flags"].items():
        print(f"{name}: {value}")
