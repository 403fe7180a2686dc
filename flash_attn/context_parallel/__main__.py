"""What a long sequence takes, on paper: time, memory, and how to divide GPUs. Nothing here is measured.

python -m flash_attn.context_parallel --seqlen 1M --gpus 4
python -m flash_attn.context_parallel --seqlen 128k --gpus 64 --per-node 8 --tp 8
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from flash_attn.context_parallel import _estimate
from flash_attn.context_parallel._estimate import Machine, Model, Options

_UNITS = {"k": 2**10, "m": 2**20}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the estimate that the command line asks for."""
    args = _parse(argv)
    model, machine, options = _named(Model, args), _named(Machine, args), _named(Options, args)
    if args.measure is not None:
        machine = _estimate.measured(machine, args.measure)
    cp = args.gpus // args.tp
    print(
        f"Estimate, not measured: {args.seqlen:,} tokens, {model.parameters / 1e9:.2f} B parameters, {args.gpus} GPUs"
    )
    print(f"  with {machine}")
    print(f"  and {options}")
    print(f"\nAttention of one layer over {cp} ranks, causal")
    best = None
    for each in _estimate.attention(model, machine, args.seqlen, cp, options):
        compute, transfer, exposed = ("/".join(f"{x:.2f}" for x in pair) for pair in each[1:4])
        forward, both = each.efficiency
        print(
            f"  {each.method:8} forward/backward: compute {compute} ms, transfers {transfer} ms, exposed {exposed} ms\n"
            f"           {each.received / 1e6:.0f} MB received; efficiency {forward:.2f} forward, {both:.2f} both; "
            f"bound: {each.bound}"
        )
        best = each if best is None or both > best.efficiency[1] else best
    print("\nMemory of a GPU, GB")
    items = _estimate.memory(model, args.seqlen, cp, args.tp, cp, options)
    for name, size in items.items():
        print(f"  {name:34} {size:7.1f}")
    total = sum(items.values())
    fits = "fits in" if total <= machine.memory else "does not fit in"
    print(f"  {'sum':34} {total:7.1f}   {fits} {machine.memory:.0f}; {_lever(model, args, cp, options, total)}")
    if options.offload:
        host = _estimate.kept(model, args.seqlen / cp, args.tp, options)
        print(f"  in the memory of the host, for each GPU {host:.1f} GB")
    longest = _estimate.longest(model, machine, cp, args.tp, cp, options)
    print(f"  the longest sequence that fits: {longest:,} tokens")
    seconds = _estimate.step_seconds(model, machine, args.seqlen, cp, args.tp, options, best)
    flops = 3.5 * _estimate.attention_flops(model, args.seqlen)[0] * model.layers
    share = flops / (flops + 6 * model.parameters * args.seqlen)
    print(f"\nStep: {seconds:.1f} s, {args.seqlen / seconds:,.0f} tokens/s; attention has {share:.0%} of the FLOP")
    batch = args.batch or args.seqlen * args.gpus
    print(_advice(_estimate.layouts(model, machine, args.seqlen, args.gpus, batch, options), best, batch))


def _lever(model, args, cp, options, total):
    """What would help most."""
    levers = {
        "offload": options._replace(offload=True),
        "twice the MLP chunks": options._replace(mlp_chunks=2 * options.mlp_chunks),
        "half of the loss chunk": options._replace(loss_chunk=options.loss_chunk // 2),
    }
    saved = {
        name: total - sum(_estimate.memory(model, args.seqlen, cp, args.tp, cp, each).values())
        for name, each in levers.items()
    }
    saved["twice the ranks"] = total - sum(
        _estimate.memory(model, args.seqlen, 2 * cp, args.tp, 2 * cp, options).values()
    )
    name = max(saved, key=saved.__getitem__)
    return f"{name} would save most, {saved[name]:.1f}"


def _advice(ranked, best, batch):
    if not ranked:
        return "\nNo division of these GPUs fits: offload, take more chunks, or more GPUs."
    rate, dp, cp, tp = ranked[0]
    margin = f", {rate / ranked[1][0] - 1:.0%} above the next" if len(ranked) > 1 else ""
    method = f", attention by {best.method}" if cp > 1 else ""
    division = f"dp {dp}, cp {cp}, tp {tp}{method}"
    return f"\nRecommended for steps of {batch:,} tokens: {division}: {rate:,.0f} tokens/s{margin} (estimate)"


def _named(kind, args):
    return kind(**{name: getattr(args, name) for name in kind._fields})


def _parse(argv):
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn.context_parallel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seqlen", type=_tokens, default=2**20, help="tokens of a sequence, as 128k or 1M (default: 1M)"
    )
    parser.add_argument("--gpus", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share each layer; the others share the sequence")
    parser.add_argument("--batch", type=_tokens, help="tokens of a step of all GPUs (default: a sequence for each)")
    parser.add_argument("--measure", type=Path, help="a CSV of the benchmark, whose rates replace those below")
    for kind in (Model, Machine, Options):
        for name, default in kind._field_defaults.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(default, bool):
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
            else:
                parser.add_argument(flag, type=type(default), default=default, help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.tp < 1 or args.gpus < 1 or args.gpus % args.tp:
        parser.error(f"--tp must divide --gpus, {args.gpus}, found {args.tp}")
    return args


def _tokens(text):
    unit = _UNITS.get(text[-1:].lower(), 1)
    try:
        value = int(float(text.rstrip("kKmM")) * unit)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a number of tokens, as 4096, 128k or 1M, found {text!r}")
    return value


if __name__ == "__main__":
    main()
