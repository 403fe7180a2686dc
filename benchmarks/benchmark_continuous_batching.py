"""Tokens per second of transformers' continuous batching, with its attention by this package and by PyTorch.

flash_attn      attn_implementation="flash_attention_2", which finds this package: prompts beside decoding are packed
                sequences, and steps in which all requests decode are calls of flash_attn_with_kvcache over pages
without graphs  the same without CUDA graphs, so that the host's time counts
sdpa            PyTorch's attention with a mask of all requests

All requests are there from the start, and each generates the same number of tokens, after prompts of random tokens and
lengths; each round draws new ones. Weights are random. The clock runs from the first request to the last token, after a
round that captures graphs; the median of the rounds counts. Providers run one after the other. For a change of this
package, run it before and after with the same --csv: the rows name the version.

    python -m benchmarks.benchmark_continuous_batching                              # all cases
    python -m benchmarks.benchmark_continuous_batching 'llama-1.3B*' --providers flash_attn --rounds 5
"""

import argparse
import dataclasses
import fnmatch
import pathlib
import random
import statistics
import sys
import time

import torch

from benchmarks.benchmark_models import MODELS, Shape, freed, theirs
from benchmarks.harness import environment
from benchmarks.rows import ROWS, append_csv

PROVIDERS = {  # attn_implementation, and options of continuous batching
    "flash_attn": ("flash_attention_2", {}),
    "without graphs": ("flash_attention_2", dict(use_cuda_graph=False, use_async_batching=False)),
    "sdpa": ("sdpa", {}),
}
BASELINE = "sdpa"


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests to a model: how many, the shortest and the longest prompt, and how many tokens each generates."""

    model: str
    shape: Shape
    requests: int
    prompts: tuple[int, int]
    new_tokens: int
    page_size: int
    pool: tuple[int, int] | None = None  # pages, and tokens of a step; None: transformers chooses

    def __str__(self):
        low, high = self.prompts
        return f"{self.model} {self.requests}x{low}-{high}+{self.new_tokens} page {self.page_size}"


def cases(device):
    shapes = MODELS[device]
    if device == "cpu":
        yield Case("llama-tiny", shapes["llama-tiny"], 6, (3, 9), 4, 4, pool=(64, 16))
        return
    for page_size in (16, 256):
        yield Case("llama-1.3B", shapes["llama-1.3B"], 256, (32, 512), 128, page_size)
    yield Case("llama-7B", shapes["llama-7B"], 128, (32, 512), 128, 256)
    yield Case("llama-7B", shapes["llama-7B"], 64, (2048, 4096), 128, 256)


@dataclasses.dataclass
class Row:
    """One line of the table and of the CSV file.

    tokens_per_s: generated tokens, over the median of the rounds. s, s_min, s_max: seconds of a round. ratio: tokens
    per second over those of sdpa.
    """

    case: str
    provider: str
    tokens_per_s: float
    s: float
    s_min: float
    s_max: float
    ratio: float | None
    device: str
    cuda: str
    torch: str
    version: str


def main() -> None:
    """Run the cases that the command line asks for, appending rows as they are made; print them.

    At the end, exits with status 1 and the names and errors of the runs that have failed, if there are any. On the CPU
    these are all but those of sdpa, since transformers takes this package on a GPU only.
    """
    args = _parse()
    failed = []
    for case in args.chosen:
        found = {}
        for provider in args.providers:
            print(f"{case}: {provider}", file=sys.stderr, flush=True)
            try:
                found[provider] = measure(case, provider, args.device, args.rounds)
            except Exception as error:  # a package or memory is missing: the others go on
                failed.append(f"{case}: {provider}: {type(error).__name__}: {error}")
                print(f"  failed: {provider}", file=sys.stderr)
        rows = [_row(case, provider, found, args.device) for provider in found]
        append_csv(args.csv, [dataclasses.asdict(row) for row in rows])
        for row in rows:
            ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
            print(
                f"{row.case} {row.provider}: {row.tokens_per_s:.4g} tokens per second, ratio {ratio}, "
                f"{row.s:.3g} s ({row.s_min:.3g} to {row.s_max:.3g})",
                flush=True,
            )
    print("rows:", args.csv)
    if failed:
        raise SystemExit("\n".join(("failed:", *failed)))


def _parse():
    default = "cuda" if torch.cuda.is_available() else "cpu"
    names = ", ".join(str(case) for device in ("cpu", "cuda") for case in cases(device))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"cases: {names}"
    )
    parser.add_argument("cases", nargs="?", default="*", help="glob over the names of cases (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default, help="default: %(default)s")
    parser.add_argument(
        "--providers", nargs="+", choices=list(PROVIDERS), default=list(PROVIDERS), help="measure these only"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that are measured (default: %(default)s)")
    parser.add_argument(
        "--csv", type=pathlib.Path, default=ROWS / "continuous_batching.csv", help="default: %(default)s"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, found {args.rounds}")
    args.chosen = [case for case in cases(args.device) if fnmatch.fnmatch(str(case), args.cases)]
    if not args.chosen:
        parser.error(f"no case matches {args.cases!r}; there are: {names}")
    return args


def measure(case: Case, provider: str, device: str, rounds: int) -> list[float]:
    """The seconds that each round takes."""
    import transformers

    freed()
    implementation, options = PROVIDERS[provider]
    model = theirs(case.shape, case.prompts[1] + case.new_tokens, device).eval()
    model.set_attn_implementation(implementation)
    if case.pool is not None:
        options = options | dict(zip(("num_blocks", "max_batch_tokens"), case.pool, strict=True))
    config = transformers.ContinuousBatchingConfig(page_size=case.page_size, auto_switch_to_flash=False, **options)
    generation = transformers.GenerationConfig(
        max_new_tokens=case.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    draw, seconds = random.Random(0), []
    lengths = [draw.randint(*case.prompts) for _ in range(case.requests)]
    for _ in range(rounds + 1):
        prompts = [[draw.randrange(3, case.shape.vocab) for _ in range(length)] for length in lengths]
        start = time.perf_counter()
        results = model.generate_batch(prompts, generation, config, persistent_manager=True).values()
        seconds.append(time.perf_counter() - start)
        wrong = [result.error or len(result.generated_tokens) for result in results]
        if wrong != [case.new_tokens] * case.requests:
            raise RuntimeError(f"each request must get {case.new_tokens} tokens, found {wrong[:5]}")
    model.destroy_cached_continuous_batching_manager()
    return seconds[1:]


def _row(case, provider, found, device):
    def tokens_per_s(name):
        return case.requests * case.new_tokens / statistics.median(found[name])

    seconds = found[provider]
    return Row(
        str(case),
        provider,
        tokens_per_s(provider),
        statistics.median(seconds),
        min(seconds),
        max(seconds),
        ratio=tokens_per_s(provider) / tokens_per_s(BASELINE) if BASELINE in found else None,
        **environment(device),
    )


if __name__ == "__main__":
    main()
