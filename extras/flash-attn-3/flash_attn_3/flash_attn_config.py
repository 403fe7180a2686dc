"""The module `flash_attn_config`, where other packages look for it, too."""

from flash_attn_config import *  # noqa: F403
