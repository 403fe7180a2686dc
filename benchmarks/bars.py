"""A plot of the rows of one benchmark: a panel for each op, in which each case has a bar for each provider."""

import pathlib


def draw(path: pathlib.Path, rows: list) -> pathlib.Path:
    """Write the plot of rows, which have the attributes of harness.Row, to a file whose suffix says of which kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(row.op for row in rows))
    colors = {provider: f"C{i}" for i, provider in enumerate(dict.fromkeys(row.provider for row in rows))}
    figure, axes = pyplot.subplots(len(ops), figsize=(12, 4 * len(ops)), squeeze=False, layout="constrained")
    for op, axis in zip(ops, axes[:, 0], strict=True):
        _draw_op(axis, op, [row for row in rows if row.op == op], colors)
    figure.suptitle(f"{rows[0].device}, torch {rows[0].torch}")
    figure.savefig(path, dpi=120)
    return path


def _draw_op(axis, op, rows, colors):
    cases = list(dict.fromkeys(f"{row.case} {row.dtype}" for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    rate, unit = "ms", "ms"
    for column, its_unit, peak in (("tflops", "TFLOP/s", "matmul"), ("gbps", "GB/s", "copy")):
        if any(row.of == peak for row in rows):
            rate, unit = column, its_unit
    for number, provider in enumerate(providers):
        heights = {f"{row.case} {row.dtype}": getattr(row, rate) or 0 for row in rows if row.provider == provider}
        places = [cases.index(case) + (number - (len(providers) - 1) / 2) * 0.8 / len(providers) for case in heights]
        bars = axis.bar(places, heights.values(), 0.8 / len(providers), label=provider, color=colors[provider])
        axis.bar_label(bars, fmt="%.3g", fontsize=7)
    axis.set(title=op, ylabel=unit, xticks=range(len(cases)))
    axis.set_xticklabels(cases, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
    axis.legend(fontsize=8)
