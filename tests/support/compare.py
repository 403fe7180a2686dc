"""The tolerance of this suite: an error relative to that of the same maths in plain torch at the same precision."""

import torch


def assert_error_ratio(ours, exact, baseline, *, at_most=2.0, plus=None, name="result"):
    """Assert that max|ours - exact| <= at_most * max|baseline - exact| + plus.

    ours:     what is tested, any dtype.
    exact:    the same in float64, same shape. NaN, +inf and -inf must be in the same places in `ours`.
    baseline: the same from plain torch at the precision of `ours`, same shape.
    plus:     what is allowed beyond the baseline; by default what no implementation can avoid (see `unavoidable`).
    """
    assert ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    assert_same_special_values(ours, exact, name=name)
    if exact.numel() == 0:
        return
    plus = unavoidable(exact, ours.dtype) if plus is None else plus
    our_error, baseline_error = error(ours, exact), error(baseline, exact)
    worst, limit = our_error.max().item(), at_most * baseline_error.max().item() + plus
    if worst > limit:
        index = tuple(i.item() for i in torch.unravel_index(our_error.argmax(), exact.shape))
        raise AssertionError(
            f"{name}: error {worst:.3e} exceeds {limit:.3e} = {at_most} * {baseline_error.max().item():.3e} "
            f"(plain torch) + {plus:.3e}.\n"
            f"Worst element {index}: {ours[index].item()!r}, exact {exact[index].item()!r}, "
            f"plain torch {baseline[index].item()!r}.\n"
            f"{(our_error > limit).sum().item()} of {exact.numel()} elements exceed it."
        )


def assert_same_special_values(ours, exact, *, name="result"):
    """Assert that NaN, +inf and -inf stand in exactly the same places."""
    for what, found in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = found(ours) != found(exact)
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name}: {what} in the wrong places, {wrong.sum().item()} of {exact.numel()} elements. "
                f"First at {index}: {ours[index].item()!r}, exact {exact[index].item()!r}."
            )


def error(x, exact):
    """|x - exact| in float64; 0 where either is not finite."""
    return (x.double() - exact.double()).abs().nan_to_num(nan=0.0, posinf=0.0)


def largest_error(x, exact):
    """max|x - exact|, 0 of nothing."""
    return error(x, exact).max().item() if exact.numel() else 0.0


def rms_error(x, exact):
    return error(x, exact).square().mean().sqrt().item()


def unavoidable(exact, dtype, terms=128):
    """The error of only storing `exact` in `dtype`, plus that of summing `terms` numbers of size 1 in float32."""
    return largest_error(exact.to(dtype), exact) + terms * torch.finfo(torch.float32).eps


def assert_same_but_for_rounding(found, expected, noise=None):
    """Assert that the results of two schedules of the same sums differ at most by one more rounding of the largest sum.

    Where all results are tiny, they are rounded to the distance of subnormal numbers, eps * smallest_normal.
    noise: for each result, how much of it may be left of sums that cancel; by default nothing.
    """
    noise = [0.0] * len(expected) if noise is None else noise
    for one, other, plus in zip(found, expected, noise, strict=True):
        finite, numbers = other[other.isfinite()], torch.finfo(other.dtype)
        largest = max(finite.abs().max().item() if finite.numel() else 0.0, numbers.smallest_normal)
        torch.testing.assert_close(one, other, rtol=0, atol=2 * numbers.eps * largest + plus)


def identical(a, b):
    """Equal bit for bit, except that any NaN equals any other."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def narrow_in_triton(x, dtype):
    """x in a narrower dtype as Triton rounds it; its interpreter on the CPU cuts off what bfloat16 does not hold."""
    if x.is_cuda or dtype != torch.bfloat16:
        return x.to(dtype)
    return (x.float().view(torch.int32) >> 16).to(torch.int16).view(dtype)
