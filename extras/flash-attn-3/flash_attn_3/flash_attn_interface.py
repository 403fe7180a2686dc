"""The functions of the module `flash_attn_interface`, where other packages look for them, too."""

from flash_attn_interface import *  # noqa: F403
from flash_attn_interface import _flash_attn_backward as _flash_attn_backward
from flash_attn_interface import _flash_attn_forward as _flash_attn_forward
