"""Tokens per second of the training harness, end to end, beside a bare loop and the model of transformers.

harness       `training/run.py`: data, logging and callbacks as in the experiment, but without checkpoints: none would
              fall among the steps that are measured, and that of the end can take minutes
bare          a loop of the same model, loss, precision, clipping, optimizer and schedule on one batch that stays on the
              GPU: what the harness could reach
transformers  the harness with the model of transformers, SDPA and torch.compile
benchmark     a step of `benchmarks.benchmark_models` with the same shape, batch and settings, in the process of the
              harness: the two take turns, some steps each, so that `of_benchmark` does not depend on the GPU's clock

"recipe" has the settings of the recipe in configs/: weights in float32 under autocast, dropout, clipping, a residual
stream in float32. "lean" has those of the benchmark: weights in bf16 with masters in float32, and none of these.

The command line names cases by the number of GPUs and a name; `1/tiny` is for machines without a GPU, and all others
need GPUs. With several GPUs, "apart" is as many independent runs at once, one on each, and `scaling` is the tokens per
second divided by those of these runs together: what working together costs. Beside the harness as it is configured,
others send gradients in bf16 or, with FSDP2, gather each layer twice, for the forward and again for the backward
(ZeRO-3). Providers run one after the other. If a run fails, its row is left out, and the exit status is 1. The clock
runs from the end of one optimizer step to the end of a later one, at both of which the host waits for the GPU.

    python -m benchmarks.benchmark_training                           # all cases that the GPUs here allow
    python -m benchmarks.benchmark_training '1/gpt2-124M*' --steps 200
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import pathlib
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.profilers import Profiler

from benchmarks.harness import environment
from benchmarks.rows import ROWS, append_csv

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARM_UP = 20  # optimizer steps
TURN = 10  # of two that take turns
TEXT_BYTES = 4 * 10**7  # so that no epoch ends while the clock runs


@dataclasses.dataclass(frozen=True)
class Case:
    """A training run: devices, a name, and what selects it on the command line of run.py."""

    devices: int
    name: str
    batch: int  # sequences of a step on one device
    overrides: tuple[str, ...]
    transformers: tuple[str, ...] = ()  # in place of the experiment of the first override; none if empty
    like: str | None = None  # the setting of benchmark_models.TRAINING that it has; None for none of them
    # On several GPUs, how they work together: {provider: overrides}
    together: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __str__(self):
        return f"{self.devices}/{self.name}"

    def providers(self):
        """{provider: overrides}"""
        alone = (*self.overrides, "trainer.strategy=null")
        if self.devices > 1:
            return {"apart": alone} | {name: (*self.overrides, *how) for name, how in self.together.items()}
        found = {"harness": alone, "bare": (*alone, f"trainer._target_={__spec__.name}.BareLoop")}
        if self.like is not None:
            found["harness"] = (*alone, f"+callbacks.stopwatch.beside={self.like}")
        if self.transformers:
            found["transformers"] = (*self.transformers, *alone[1:], "train.compile=true")
        return found


_SMALL = ("experiment=owt/gpt2s-flash", "trainer.precision=bf16")
_MEDIUM = ("experiment=owt/gpt2m-flash", "trainer.precision=bf16")
_LEAN = (
    "trainer.precision=bf16-true",
    "optimizer=adamw-master",
    "trainer.gradient_clip_val=null",
    "train.loss_fn=linear",
    "model.config.residual_in_fp32=false",
    *(f"++model.config.{kind}_pdrop=0.0" for kind in ("resid", "embd", "attn")),
)
_DDP = {
    "harness": ("strategy=ddp",),
    "bf16 gradients": ("strategy=ddp", "trainer.strategy.ddp_comm_hook=bfloat16_compress_hook"),
}
_FSDP = {
    "harness": ("strategy=fsdp",),
    "gathered twice": ("strategy=fsdp", "trainer.strategy.reshard_after_forward=true"),
    "bf16 gradients": ("strategy=fsdp", "trainer.strategy.reduce_dtype=bfloat16"),
}
_1B = ("experiment=pile/gpt3xl-flash", "optimizer=adamw", "datamodule.max_length=2048")


def cases(device):
    if device == "cpu":
        yield Case(1, "tiny", 16, ("experiment=tiny/text", "trainer.accelerator=cpu"))
        return
    for name, batch, flash, theirs in (
        ("gpt2-124M", 32, _SMALL, "owt/gpt2s-hf"),
        ("gpt2-350M", 16, _MEDIUM, "owt/gpt2m-hf"),
    ):
        yield Case(1, name, batch, flash, (f"experiment={theirs}",), like="train_recipe")
        yield Case(1, f"{name} lean", batch, (flash[0], *_LEAN), like="train_masters")
    yield Case(1, "gpt3-1.3B", 8, _1B)
    for devices in (2, 4):
        yield Case(devices, "gpt2-124M ddp", 32, _SMALL, together=_DDP)
        yield Case(devices, "gpt3-1.3B fsdp", 8, _1B, together=_FSDP)


@dataclasses.dataclass
class Row:
    """One line of the table and of the CSV file.

    ms: of an optimizer step. of_bare, of_benchmark, ratio, scaling: tokens per second over those of the bare loop, of
    the benchmark's step, of transformers, and of the runs apart. loader: the share of the time in which the loop waits
    for a batch. peak_mb: of the first GPU, everything included.
    """

    devices: int
    case: str
    provider: str
    tokens_per_s: float
    ms: float
    of_bare: float | None
    of_benchmark: float | None
    ratio: float | None
    scaling: float | None
    loader: float | None
    peak_mb: float | None
    device: str
    cuda: str
    torch: str
    version: str


def main() -> None:
    """Run the cases that the command line asks for, appending rows as they are made; print them.

    At the end, exits with status 1 and the names of the runs that have failed, if there are any.
    """
    args = _parse()
    failed = []
    text = args.text or (_python_files(args.csv.parent) if torch.cuda.is_available() else "python_sources")
    for case in args.chosen:
        found = {}
        for provider, overrides in case.providers().items():
            if args.providers is None or provider in args.providers:
                print(f"{case}: {provider}", file=sys.stderr, flush=True)
                found[provider] = _run(case, [*overrides, *args.overrides], text, args.steps, apart=provider == "apart")
        failed += [f"{case}: {provider}" for provider, result in found.items() if result is None]
        found = {provider: result for provider, result in found.items() if result is not None}
        if "benchmark" in found.get("harness", {}):
            found["benchmark"] = found["harness"].pop("benchmark")
        rows = [_row(case, provider, found) for provider in found]
        append_csv(args.csv, [dataclasses.asdict(row) for row in rows])
        for row in rows:
            print(*_values(row), flush=True)
    print("rows:", args.csv)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _python_files(folder):
    path = folder / "sources.jsonl"
    if not path.exists():
        write_python_files(path, TEXT_BYTES)
    return path.absolute()


def _values(row):
    """The columns to print: those behind `device` are the same in all rows of a machine."""
    for field, value in dataclasses.asdict(row).items():
        if field == "device":
            return
        yield value if field in ("devices", "case", "provider") else f"{field}={value:.4g}" if value else f"{field}=-"


def _row(case, provider, found):
    this = found[provider]

    def over(other):
        return this["tokens_per_s"] / found[other]["tokens_per_s"] if other in found else None

    return Row(
        case.devices,
        case.name,
        provider,
        this["tokens_per_s"],
        this["ms"],
        of_bare=over("bare"),
        of_benchmark=over("benchmark"),
        ratio=over("transformers"),
        scaling=over("apart"),
        loader=this["loader"],
        peak_mb=this["peak_mb"],
        **environment(this["device"]),
    )


def _parse():
    gpus, with_gpus = torch.cuda.device_count(), list(cases("cuda"))
    runnable = [case for case in with_gpus if case.devices <= gpus] if gpus else list(cases("cpu"))
    names = ", ".join(map(str, [*cases("cpu"), *with_gpus]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"cases: {names}"
    )
    parser.add_argument("cases", nargs="?", default="*", help="glob over devices/case (default: all that can run)")
    parser.add_argument("overrides", nargs="*", help="further arguments of run.py, for all")
    parser.add_argument("--text", help="what to train on (default: the Python code that is installed here)")
    parser.add_argument("--providers", nargs="+", help="measure these only (default: all)")
    parser.add_argument("--steps", type=_steps, default=100, help="optimizer steps that are measured (default: 100)")
    parser.add_argument("--csv", type=pathlib.Path, default=ROWS / "training.csv", help="default: %(default)s")
    args = parser.parse_intermixed_args()
    args.chosen, left_out = (
        [case for case in some if fnmatch.fnmatch(str(case), args.cases)]
        for some in (runnable, [case for case in with_gpus if case not in runnable])
    )
    needs = f"{', '.join(map(str, left_out))}: these cases need more GPUs than there are here, {gpus}"
    if not args.chosen:
        parser.error(needs if left_out else f"no case matches {args.cases!r}; there are: {names}")
    if left_out:
        print(f"left out {needs}", file=sys.stderr)
    providers = dict.fromkeys(name for case in args.chosen for name in case.providers())
    for name in args.providers or ():
        if name not in providers:  # perhaps an argument of run.py, which --providers has taken as it followed
            parser.error(f"--providers must be of {', '.join(providers)}, found {name!r}")
    return args


def _steps(text):
    steps = int(text) if text.isdecimal() else 0
    if steps < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, found {text!r}")
    return steps


def _run(case, overrides, text, steps, apart):
    """Train in processes of their own. Returns what their Stopwatches have written, or None if a run failed."""
    with tempfile.TemporaryDirectory() as folder:
        devices = 1 if apart else case.devices
        runs = [pathlib.Path(folder, str(i)) for i in range(case.devices if apart else 1)]
        processes = []
        for i, run in enumerate(runs):
            common = [
                "datamodule=text",
                f"datamodule.dataset_name={text}",
                "datamodule.num_workers=8",
                f"trainer.devices={devices}",
                f"datamodule.batch_size={case.batch}",
                f"++train.global_batch_size={case.batch * devices}",
                f"trainer.max_steps={WARM_UP + steps}",
                "++trainer.limit_val_batches=0",
                "test_after_training=false",
                "logger=csv",
                "print_config=false",
                "++callbacks.model_checkpoint=null",
                "++callbacks.model_checkpoint_progress=null",
                f"hydra.run.dir={run}",
                f"+callbacks.stopwatch._target_={__spec__.name}.Stopwatch",
                f"+callbacks.stopwatch.file={run}.json",
            ]
            environ = os.environ | {"PYTHONPATH": paths()} | ({"CUDA_VISIBLE_DEVICES": _gpu(i)} if apart else {})
            command = [sys.executable, "run.py", overrides[0], *common, *overrides[1:]]
            processes.append(subprocess.Popen(command, cwd=ROOT / "training", env=environ, stdout=sys.stderr))
        codes = [process.wait() for process in processes]
        if any(codes):
            print(f"  failed with exit codes {codes}", file=sys.stderr)
            return None
        results = [json.loads(run.with_suffix(".json").read_text()) for run in runs]
        return results[0] | {"tokens_per_s": sum(result["tokens_per_s"] for result in results)}


def _gpu(i):
    """The name of a GPU for processes that shall see no other."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[i] if visible else str(i)


def write_python_files(path: pathlib.Path, size: int) -> None:
    """Write a JSON Lines file with modules of Python's library and of what is installed, of about so many bytes.

    The order mixes them.
    """
    modules = sorted(pathlib.Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    modules += sorted(pathlib.Path(sysconfig.get_path("purelib")).rglob("*.py"))
    random.Random(0).shuffle(modules)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for module in modules:
            if file.tell() > size:
                break
            text = module.read_text(errors="ignore")
            if len(text) > 100:
                file.write(json.dumps({"text": text}) + "\n")


def paths() -> str:
    """PYTHONPATH for run.py: this project is found first, then what is found here."""
    return os.pathsep.join([str(ROOT), str(ROOT / "training"), *sys.path])


# ---------------------------------------------------------------------------------------------------------------------
# In the processes of the runs


class Stopwatch(L.Callback):
    """Writes how long the optimizer steps after the first WARM_UP took, and how much of it was the wait for batches.

    Arguments:
        file: the JSON file to write.
        beside: a setting of benchmark_models.TRAINING. After every TURN steps its step runs as often, with a model of
            the same sizes, on the batch of that moment; the clock of the run stands still, and its own goes.
    """

    def __init__(self, file: str, beside: str | None = None) -> None:
        self.file, self.beside, self.waits = pathlib.Path(file), beside, _Waits()
        self.seconds = self.seconds_beside = 0.0
        self.steps_beside = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        trainer.profiler = self.waits

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, last = trainer.global_step, trainer.max_steps
        tokens = batch[0].numel() * trainer.world_size
        if self.beside is not None:
            if step == WARM_UP:
                self.peak_mb = _peak_mb()
                self.other = _step_of_benchmark(pl_module.model, batch[0], self.beside)
                self._turn(WARM_UP)
                self.seconds_beside, self.steps_beside = 0.0, 0
            elif step > WARM_UP and ((step - WARM_UP) % TURN == 0 or step == last):
                self.seconds += self._since()
                self._turn(TURN)
        self.tick(step, last, tokens, trainer.is_global_zero)

    def _turn(self, steps):
        """Let the benchmark do some steps."""
        start = _now()
        for _ in range(steps):
            self.other()
        self.start = _now()
        self.seconds_beside += self.start - start
        self.steps_beside += steps

    def _since(self):
        return _now() - self.start

    def tick(self, step: int, last: int, tokens: int, writes: bool = True) -> None:
        """To be called after each optimizer step; tokens: of one step, in all processes."""
        if step == WARM_UP:
            self.start, self.waits.seconds = _now(), 0.0
        elif step == last and writes:
            seconds = self.seconds if self.beside is not None else self._since()
            found = _result(tokens, seconds, last - WARM_UP, self.waits.seconds)
            if self.beside is not None:
                found |= {
                    "peak_mb": self.peak_mb,
                    "benchmark": _result(tokens, self.seconds_beside, self.steps_beside, None),
                }
            self.file.write_text(json.dumps(found))


def _step_of_benchmark(model, input_ids, setting):
    """A function that takes a step of training with a model of the same sizes, as benchmark_models has it."""
    from benchmarks import benchmark_models

    config = model.config
    inner = config.n_inner or 4 * config.n_embd
    shape = benchmark_models.Shape(config.n_embd, config.n_layer, config.n_head, inner, config.vocab_size)
    how = benchmark_models.TRAINING[setting]
    return benchmark_models.trainer(benchmark_models.ours, shape, input_ids.clone(), False, how)


def _result(tokens, seconds, steps, waits):
    return {
        "tokens_per_s": tokens * steps / seconds,
        "ms": 1e3 * seconds / steps,
        "loader": None if waits is None else waits / seconds,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "peak_mb": None if waits is None else _peak_mb(),
    }


def _now():
    """The time when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mb():
    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None


class _Waits(Profiler):
    """Adds up the time in which Lightning's loop waits for the next batch."""

    seconds = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self.since


class BareLoop:
    """In place of Lightning's Trainer: as little as training takes, on one batch."""

    checkpoint_callback = None
    world_size = 1
    accelerator = CUDAAccelerator() if torch.cuda.is_available() else CPUAccelerator()

    def __init__(
        self,
        max_steps: int,
        callbacks: list,
        precision: str = "32-true",
        gradient_clip_val: float | None = None,
        **ignored: Any,
    ) -> None:
        self.max_steps, self.clip, self.callback_metrics = max_steps, gradient_clip_val, {}
        self.global_step = max_steps  # after fit
        self.dtype = {"bf16-mixed": torch.bfloat16, "32-true": None, "bf16-true": None}[precision]
        self.weights = torch.bfloat16 if precision == "bf16-true" else None
        self.stopwatch = next(each for each in callbacks if isinstance(each, Stopwatch))

    def fit(self, task: Any, datamodule: Any, ckpt_path: None) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        task.to(device, self.weights).train()
        found = task.configure_optimizers()
        found = found if isinstance(found, dict) else {"optimizer": found}
        optimizer, schedule = found["optimizer"], found.get("lr_scheduler", {}).get("scheduler")
        batch = [x.to(device) for x in next(iter(datamodule.train_dataloader()))]
        for step in range(1, self.max_steps + 1):
            with torch.autocast(device.type, self.dtype, enabled=self.dtype is not None):
                loss, *_ = task.step(batch)
            loss.backward()
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(task.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            self.stopwatch.tick(step, self.max_steps, batch[0].numel())


if __name__ == "__main__":
    main()
