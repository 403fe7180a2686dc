"""Softmax of scaled attention scores with a causal or a padding mask, for any shape, and the module that chooses.

    probs = scaled_masked_softmax(scores, mask, scale)                    # mask: True is left out
    probs = scaled_upper_triang_masked_softmax(scores, None, scale)       # row i sees columns up to i

Scores are (batch, heads, seqlen_q, seqlen_k), in float32, float16 or bfloat16, and so are the probabilities; the
maths is float32. A row with all columns left out gives zeros.
"""

import enum
from collections.abc import Callable

import torch

from flash_attn._ops import checks, fused_softmax


class AttnMaskType(enum.Enum):
    """Which scores count: those that a mask leaves (padding), or those up to the diagonal (causal).

    Example:
        >>> from flash_attn.fused_softmax import AttnMaskType, FusedScaleMaskSoftmax
        >>> softmax = FusedScaleMaskSoftmax(False, False, AttnMaskType.causal, True, None, True, scale=None)
        >>> softmax(torch.zeros(1, 1, 2, 2), None)[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """

    padding = 1
    causal = 2


def scaled_upper_triang_masked_softmax(inputs: torch.Tensor, _: None, scale: float) -> torch.Tensor:
    """Softmax of row i of scale * inputs over columns up to i; 0 right of them.

    Arguments:
        inputs: (batch, heads, seqlen, seqlen), or without the leading dimensions or with more of them.
        _: not used; the place of the mask.
        scale: a number.

    Returns a tensor like inputs. Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.fused_softmax import scaled_upper_triang_masked_softmax
    >>> scaled_upper_triang_masked_softmax(torch.zeros(1, 1, 3, 3), None, 1.0)[0, 0, 1]
    tensor([0.5000, 0.5000, 0.0000])
    """
    checks.tensor("inputs", inputs, dtypes=fused_softmax.DTYPES)
    checks.number("the number of dimensions of inputs", inputs.dim(), inputs.dim() >= 2, "at least 2")
    batches = inputs.reshape(1, inputs.shape[:-2].numel(), *inputs.shape[-2:])
    return fused_softmax.softmax(batches, None, scale, True).view(inputs.shape)


def scaled_masked_softmax(inputs: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Softmax of the rows of scale * inputs over the columns that are not masked; 0 elsewhere.

    Arguments:
        inputs: (batch, heads, seqlen_q, seqlen_k).
        mask: bool or uint8, nonzero where inputs are left out, or None. Its four sizes are the sizes of inputs, or 1.
        scale: a number.

    Returns a tensor like inputs. Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.fused_softmax import scaled_masked_softmax
    >>> scaled_masked_softmax(torch.zeros(1, 1, 1, 3), torch.tensor([[[[False, True, False]]]]), 1.0)
    tensor([[[[0.5000, 0.0000, 0.5000]]]])
    """
    return fused_softmax.softmax(inputs, mask, scale, False)


class ScaledUpperTriangMaskedSoftmax:
    """`ScaledUpperTriangMaskedSoftmax.apply(inputs, scale)` is the causal softmax of inputs (..., seqlen, seqlen).

    Example:
        >>> from flash_attn.fused_softmax import ScaledUpperTriangMaskedSoftmax
        >>> ScaledUpperTriangMaskedSoftmax.apply(torch.zeros(3, 3), 1.0)[1]
        tensor([0.5000, 0.5000, 0.0000])
    """

    @staticmethod
    def apply(inputs: torch.Tensor, scale: float) -> torch.Tensor:
        """Softmax of row i of scale * inputs (..., seqlen, seqlen) over columns up to i."""
        return scaled_upper_triang_masked_softmax(inputs, None, scale)


class ScaledMaskedSoftmax:
    """`ScaledMaskedSoftmax.apply` is `scaled_masked_softmax`.

    Example:
        >>> from flash_attn.fused_softmax import ScaledMaskedSoftmax
        >>> ScaledMaskedSoftmax.apply(torch.zeros(1, 1, 1, 3), torch.tensor([[[[False, True, False]]]]), 1.0)
        tensor([[[[0.5000, 0.0000, 0.5000]]]])
    """

    apply = staticmethod(scaled_masked_softmax)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores, fused or step by step.

    Arguments:
        input_in_fp16, input_in_bf16: the dtype of the scores; at most one is true.
        attn_mask_type: AttnMaskType.causal or AttnMaskType.padding, or another package's enum with these names.
        scaled_masked_softmax_fusion: use the fused operation, wherever there is one.
        mask_func: mask_func(scores, mask) returns the masked scores; used without fusion.
        softmax_in_fp32: without fusion, compute 16-bit scores in float32.
        scale: a number, or None for 1.

    Raises ValueError if both types are named, for a scale without softmax_in_fp32, and for an unknown mask type.

    Example:
        >>> from flash_attn.fused_softmax import AttnMaskType, FusedScaleMaskSoftmax
        >>> softmax = FusedScaleMaskSoftmax(False, True, AttnMaskType.causal, True, None, True, scale=0.125)
        >>> softmax(torch.randn(2, 4, 32, 32).bfloat16(), None).shape
        torch.Size([2, 4, 32, 32])
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: enum.Enum,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ValueError("input_in_fp16 and input_in_bf16 must not both be true, found both true")
        if scale is not None and not softmax_in_fp32:
            raise ValueError(f"softmax_in_fp32 must be true where there is a scale, found {softmax_in_fp32!r}")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.causal = _kind(attn_mask_type) is AttnMaskType.causal

    @property
    def input_in_float16(self) -> bool:
        """Whether the module was made for scores of 16 bits."""
        return self.input_in_fp16 or self.input_in_bf16

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Probabilities like input (batch, heads, seqlen_q, seqlen_k).

        mask: True where scores are left out, or None. A causal module also leaves out scores above the diagonal.
        """
        checks.tensor("input", input, dtypes=fused_softmax.DTYPES)
        checks.ndim("input", input, "(batch, heads, seqlen_q, seqlen_k)")
        if self.is_kernel_available(mask, *input.shape):
            return fused_softmax.softmax(input, mask, 1.0 if self.scale is None else self.scale, self.causal)
        return self._step_by_step(input, mask)

    def is_kernel_available(self, mask: torch.Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Returns whether the fused operation computes scores of shape (b, np, sq, sk): batch, heads, queries and keys.

        mask: as in `forward`; a module that is not causal needs one.
        """
        return bool(self.scaled_masked_softmax_fusion) and (sq == sk if self.causal else mask is not None)

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """How many rows a block of the original kernel took for scores (b, np, sq, sk). Nothing here depends on it."""
        columns = 1 << max(sk - 1, 0).bit_length()
        return 128 // min(columns, 32) * (2 if columns <= 128 else 1)

    def _step_by_step(self, input, mask):
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        if mask is not None:
            scores = self.mask_func(scores, mask)
        if self.causal:
            above = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).triu(1)
            scores = self.mask_func(scores, above)
        return scores.softmax(dim=-1).to(input.dtype)


def _kind(attn_mask_type):
    """Returns the mask type with the name of `attn_mask_type`."""
    name = getattr(attn_mask_type, "name", None)
    if name not in AttnMaskType.__members__:
        raise ValueError(f"attn_mask_type must be AttnMaskType.padding or .causal, found {attn_mask_type!r}")
    return AttnMaskType[name]
