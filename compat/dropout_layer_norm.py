"""The functions that other packages call in place of flash-attn's compiled module of this name.

    dropout_add_ln_fwd, dropout_add_ln_bwd, dropout_add_ln_parallel_residual_fwd, dropout_add_ln_parallel_residual_bwd

take and return what that module did, for any number of features and any mix of dtypes. They are thin: checks, kernels
and the reference backend are those of `flash_attn.ops.layer_norm`. Outputs that do not exist are None. So are `*_part`,
the partial sums that the module returned beside the gradients of parameters. `gen_` must be None:
dropout draws from the default generator of the device.
"""

import torch

from flash_attn._ops import layer_norm as ops


def dropout_add_ln_fwd(
    x0,
    residual,
    gamma,
    beta_,
    rowscale_,
    colscale_,
    x0_subset_,
    z_subset_,
    dropout_p,
    epsilon,
    rowscale_const,
    z_numrows,
    gen_,
    residual_in_fp32=False,
    is_rms_norm=False,
):
    """Returns [z, x, dmask, mu, rsigma]; x is None if it is x0, dmask if dropout_p is 0."""
    z, _, x, dmask, _, mu, rsigma = _forward(
        gen_,
        x0,
        residual,
        gamma,
        beta_,
        dropout_p,
        epsilon,
        rowscale=rowscale_,
        colscale=colscale_,
        x0_subset=x0_subset_,
        out_subset=z_subset_,
        rowscale_const=rowscale_const,
        out_rows=z_numrows,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        names=("x0", "gamma", "beta_", "epsilon"),
    )
    return [z, x, dmask, mu, rsigma]


def dropout_add_ln_parallel_residual_fwd(
    x0,
    x1_,
    residual,
    gamma0,
    beta0_,
    gamma1_,
    beta1_,
    dropout_p,
    epsilon,
    gen_,
    residual_in_fp32=False,
    is_rms_norm=False,
):
    """Returns [z0, z1, x, dmask0, dmask1, mu, rsigma]."""
    return _forward(
        gen_,
        x0,
        residual,
        gamma0,
        beta0_,
        dropout_p,
        epsilon,
        x1=x1_,
        weight1=gamma1_,
        bias1=beta1_,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        names=("x0", "gamma0", "beta0_", "epsilon"),
    )


def dropout_add_ln_bwd(
    dz,
    dx_,
    x,
    x0_,
    dmask_,
    mu,
    rsigma,
    gamma,
    rowscale_,
    colscale_,
    x0_subset_,
    z_subset_,
    dropout_p,
    rowscale_const,
    x0_numrows,
    has_residual,
    is_rms_norm=False,
):
    """Returns [dx0, dresidual, dgamma, dbeta, None, None], and [dcolscale, None] after them if there is a colscale_."""
    dx0, _, dresidual, dgamma, dbeta, _, _, dcolscale = ops.backward(
        dz,
        None,
        dx_,
        x,
        x0_,
        mu,
        rsigma,
        gamma,
        None,
        colscale_,
        rowscale_,
        x0_subset_,
        z_subset_,
        dmask_,
        None,
        dropout_p,
        rowscale_const,
        x0_numrows,
        False,
        has_residual,
        is_rms_norm,
        _NAMES,
    )
    return [dx0, dresidual, dgamma, dbeta, None, None, *([] if colscale_ is None else [dcolscale, None])]


def dropout_add_ln_parallel_residual_bwd(
    dz0,
    dz1_,
    dx_,
    x,
    dmask0_,
    dmask1_,
    mu,
    rsigma,
    gamma0,
    gamma1_,
    dropout_p,
    has_x1,
    has_residual,
    is_rms_norm=False,
):
    """Returns [dx0, dx1, dresidual, dgamma0, dbeta0, dgamma1, dbeta1, None, None, None, None]."""
    *gradients, _ = ops.backward(
        dz0,
        dz1_,
        dx_,
        x,
        None,
        mu,
        rsigma,
        gamma0,
        gamma1_,
        None,
        None,
        None,
        None,
        dmask0_,
        dmask1_,
        dropout_p,
        1.0,
        0,
        has_x1,
        has_residual,
        is_rms_norm,
        _NAMES_OF_TWO_BRANCHES,
    )
    return [*gradients, None, None, None, None]


# By the names of `flash_attn._ops.layer_norm.backward`.
_NAMES = dict(
    dout="dz",
    dh="dx_",
    h="x",
    x0="x0_",
    mean="mu",
    rstd="rsigma",
    weight="gamma",
    colscale="colscale_",
    rowscale="rowscale_",
    x0_subset="x0_subset_",
    out_subset="z_subset_",
    mask0="dmask_",
    x0_rows="x0_numrows",
)
_NAMES_OF_TWO_BRANCHES = dict(
    dout="dz0",
    dout1="dz1_",
    dh="dx_",
    h="x",
    mean="mu",
    rstd="rsigma",
    weight="gamma0",
    weight1="gamma1_",
    mask0="dmask0_",
    mask1="dmask1_",
)


def _forward(generator, x0, residual, gamma, beta, dropout_p, epsilon, **options):
    """What `flash_attn._ops.layer_norm.forward` returns, but None for an h that is x0."""
    if generator is not None:
        raise ValueError(f"gen_ must be None, found {generator!r}")
    with torch.no_grad():
        results = ops.forward(x0, residual, gamma, beta, epsilon, dropout_p, prenorm=True, return_mask=True, **options)
    return [None if x is x0 else x for x in results]
