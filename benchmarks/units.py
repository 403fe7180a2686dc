"""What single steps of the kernels for serving cost on a Hopper GPU, on which their design is built.

one thread   clocks per box of 8 to 64 rows of 128 bytes that one thread of each SM copies by TMA, out of the L2 cache;
             and bytes per clock
box          the same where the lanes of a warp take turns
page box     the same where each box is another page, at random
missing page the same where no such page exists: boxes of zeros, at the coordinate behind the last page
packed box   the same of 8 heads of 8 tokens, one box of 64 rows
product      clocks per wgmma of 64 x 128 x 16, 64 at best, of a warpgroup alone on its SM, in fp16 and bf16
two blocks   how many thread blocks of a consumer with 216 registers and a producer with 40 an SM runs at a time
empty block  ns per thread block of 200 KB of shared memory that reads a length of 0 and ends
L2 read      bytes per clock of an SM that reads what the L2 cache holds, all SMs at once; and alone

The kernels are in units.cu, which needs nvcc where it is compiled first, and then only the library that it has made in
build/benchmarks. Rows go to build/benchmarks/units.csv.

    python -m benchmarks.units
"""

import argparse
import ctypes
import dataclasses
import hashlib
import pathlib
import statistics
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.harness import environment
from benchmarks.rows import ROWS, append_csv

HERE = pathlib.Path(__file__).parent
CSRC = HERE.parent / "csrc"
FLAGS = ("-O2", "-std=c++20", "-shared", "-Xcompiler=-fPIC", "-gencode=arch=compute_90a,code=sm_90a")
HEAD_DIM = 64  # of tensors that boxes come from: 128 bytes
COUNT = 4096  # of boxes, or products


@dataclasses.dataclass
class Row:
    """One number. expected: what the design counts on; None where it only asks."""

    unit: str
    case: str
    value: float
    of: str
    expected: float | None
    device: str
    cuda: str
    torch: str
    version: str


def library() -> pathlib.Path:
    """The path of the compiled units.cu, made if one of its sources has changed."""
    sources = [HERE / "units.cu", *sorted(CSRC.rglob("*.cuh")), *sorted(CSRC.rglob("*.h"))]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    path = ROWS.absolute() / f"units-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["nvcc", *FLAGS, f"-I{CSRC}", "-o", str(path), str(HERE / "units.cu")], check=True)
    return path


class Units:
    """Runs the functions of the library on the current device."""

    def __init__(self, path: pathlib.Path) -> None:
        self.functions = ctypes.CDLL(str(path))
        self.blocks = torch.cuda.get_device_properties().multi_processor_count

    def run(self, name: str, *args: torch.Tensor | int) -> None:
        """Call a function, whose arguments are tensors and integers; raise RuntimeError with what it says."""
        function = getattr(self.functions, f"run_{name}")
        function.restype = ctypes.c_char_p
        values = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args)
        error = function(*map(ctypes.c_int64, values))
        if error is not None:
            raise RuntimeError(f"{name}: {error.decode()}")

    def clocks(self, name: str, *args: torch.Tensor | int, more: torch.Tensor, blocks: int | None = None) -> float:
        """The median, over thread blocks and 5 runs, of the clocks that a function takes in each block."""
        blocks = blocks or self.blocks
        found = torch.zeros(blocks, dtype=torch.int64, device="cuda")
        medians = []
        for _ in range(6):  # the first one fills caches
            self.run(name, *args, blocks, found, more)
            medians.append(found.median().item())
        return statistics.median(medians[1:])

    def boxes(
        self, data: torch.Tensor, rows: int, heads: int = 1, places: torch.Tensor | None = None, lanes: int = 32
    ) -> float:
        """Clocks per box of so many rows and heads of `data` (pages, page_size, heads, HEAD_DIM), copied by `lanes`.

        places: the page of each box, int32 (COUNT,); None walks along the rows of page 0. Raises RuntimeError where a
        page that does not exist is not read as zeros, or one that does is.
        """
        pages, page_size, all_heads, _ = data.shape
        sums = torch.full((self.blocks,), -1.0, device="cuda")
        where = 0 if places is None else places
        clocks = self.clocks("boxes", data, pages, page_size, all_heads, rows, heads, where, COUNT, lanes, more=sums)
        exists = places is None or bool((places < pages).all())
        if bool((sums != 0).all()) is not exists:
            raise RuntimeError(f"boxes of pages that {'exist' if exists else 'do not exist'} hold {sums.tolist()[:4]}")
        return clocks / COUNT


def measure(units: Units) -> Iterator[tuple[str, str, float, str, float | None]]:
    """The numbers: unit, case, value, what it is of, and what the design counts on."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    data = torch.randn(32768, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=draw)  # 4 MB
    for unit, lanes in (("one thread", 1), ("box", 32)):
        for rows in (8, 16, 32, 64):
            clocks = units.boxes(data.view(1, -1, 1, HEAD_DIM), rows, lanes=lanes)
            yield unit, f"{rows} rows", clocks, "clocks", 24.0 if rows == 8 else None
            yield unit, f"{rows} rows", 128 * rows / clocks, "bytes per clock", None
    for rows in (8, 16, 32, 64):
        pages = data.view(-1, rows, 1, HEAD_DIM)
        places = torch.randint(len(pages), (COUNT,), device="cuda", dtype=torch.int32, generator=draw)
        yield "page box", f"{rows} rows", units.boxes(pages, rows, places=places), "clocks", None
        missing = torch.full_like(places, len(pages))
        yield "missing page", f"{rows} rows", units.boxes(pages, rows, places=missing), "clocks", None
    yield "packed box", "8 tokens of 8 heads", units.boxes(data.view(1, -1, 8, HEAD_DIM), 8, 8), "clocks", None
    sink = torch.zeros(1, device="cuda")
    for is_half, dtype in ((1, "fp16"), (0, "bf16")):
        clocks = units.clocks("products", is_half, COUNT, more=sink)
        yield "product", dtype, clocks / COUNT, "clocks", 64.0
    here, together = (torch.zeros(units.blocks, dtype=torch.int32, device="cuda") for _ in range(2))
    units.run("resident", 8 * units.blocks, here, together)
    yield "two blocks", "216 and 40 registers", together.float().mean().item(), "blocks", 2.0
    count = 1 << 20
    lengths = torch.zeros(count, dtype=torch.int32, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(6):
        start.record(torch.cuda.default_stream())
        units.run("empty", lengths, count, sink)
        end.record(torch.cuda.default_stream())
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e6 / count)
    yield "empty block", f"of {count}", statistics.median(times[1:]), "ns", None
    chunks, rounds = data.numel() // 8, 256
    for blocks, case in ((units.blocks, "all SMs"), (1, "one SM")):
        clocks = units.clocks("reads", data, chunks, rounds, more=sink, blocks=blocks)
        yield "L2 read", case, rounds * 8 * 1024 * 16 / clocks, "bytes per clock", None


def main() -> None:
    """Measure all units; print the rows and append them to the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=pathlib.Path, default=ROWS / "units.csv", help="default: %(default)s")
    parser.add_argument("--build", action="store_true", help="only compile units.cu, which takes no GPU")
    args = parser.parse_args()
    if args.build:
        print(library())
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise SystemExit("needs a Hopper GPU")
    where, rows = environment("cuda"), []
    for unit, case, value, of, expected in measure(Units(library())):
        rows.append(dataclasses.asdict(Row(unit, case, value, of, expected, **where)))
        wanted = "" if expected is None else f" (expected: {expected:g})"
        print(f"{unit}, {case}: {value:.4g} {of}{wanted}", flush=True)
    append_csv(args.csv, rows)
    print("rows:", args.csv)


if __name__ == "__main__":
    main()
