"""A run that is stopped and resumed sees the sequences, in the order, of one that was not, with a real Trainer."""

import ast
import functools
import itertools
import logging
import os
import pathlib
import re
import subprocess
import sys

import lightning as L
import pytest
import torch
from counting import Counting, sequences_of


class Recorder(L.LightningModule):
    """Notes (the trainer's batch index, optimiser steps before it, the sequences) of each training batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        sequences = sequences_of(batch)
        self.seen.append((batch_idx, self.trainer.global_step, sequences))
        return self.weight * sum(sequences)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SaveAndStop(L.Callback):
    """Saves in a hook, once so many batches have begun."""

    def __init__(self, hook, batches, path):
        self.batches, self.path = batches, path
        setattr(self, hook, self.save)

    def save(self, trainer, module, *args):
        if len(module.seen) == self.batches and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def fit(data, callbacks=(), ckpt_path=None, **options):
    module = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    except SystemExit:  # what Lightning makes of a KeyboardInterrupt
        assert callbacks
    return module, trainer


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


# 23 sequences in batches of 2: an epoch has 12 batches, and the last one is not full.
EPOCH = 12
END = {"max_steps": 30, "max_epochs": -1}
HOOKS = {
    "middle": ("on_train_batch_end", 5),
    "last batch": ("on_train_batch_end", EPOCH),
    "second epoch": ("on_train_batch_end", EPOCH + 6),
    "validation": ("on_validation_end", 6),
    "validation after the last batch": ("on_validation_end", EPOCH),
    "epoch end": ("on_train_epoch_end", EPOCH),
    "second epoch end": ("on_train_epoch_end", 2 * EPOCH),
    "epoch start": ("on_train_epoch_start", EPOCH),
    "failed batch": ("on_train_batch_start", 7),
    "first batch fails": ("on_train_batch_start", EPOCH),
}


def numbers_of(workers=0, drop_last=False):
    return Counting(23, batch_size=2, loader_workers=workers, seed=5, drop_last=drop_last)


@functools.cache
def whole_run(drop_last, options):
    """The module and the steps of a run with these options, (name, value)s, that nobody stops and no worker helps."""
    module, trainer = fit(numbers_of(drop_last=drop_last), **dict(options))
    return module, trainer.global_step


def check(tmp_path, hook, batches, end, workers=0, drop_last=False, **options):
    path, options = tmp_path / "checkpoint.ckpt", end | options
    whole, steps = whole_run(drop_last, tuple(sorted(options.items())))
    before, _ = fit(numbers_of(workers, drop_last), [SaveAndStop(hook, batches, path)], **options)
    after, resumed = fit(numbers_of(workers, drop_last), ckpt_path=path, **options)
    assert before.seen + after.seen == whole.seen
    assert resumed.global_step == steps
    assert after.weight == whole.weight
    return whole


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("end", [END, {"max_epochs": 3}], ids=["max_steps", "max_epochs"])
@pytest.mark.cover(1)
def test_resumed_run_sees_the_same_batches(tmp_path, name, end):
    hook, batches = HOOKS[name]
    whole = check(tmp_path, hook, batches, end, val_check_interval=6, check_val_every_n_epoch=None)
    first_epoch = [sequence for _, _, batch in whole.seen[:EPOCH] for sequence in batch]
    second_epoch = [sequence for _, _, batch in whole.seen[EPOCH : 2 * EPOCH] for sequence in batch]
    assert sorted(first_epoch) == sorted(second_epoch) == list(range(23))
    assert first_epoch != second_epoch


EVERY_6 = {"val_check_interval": 6, "check_val_every_n_epoch": None}
IN_STEPS_OF_3 = {"accumulate_grad_batches": 3, "end": {"max_steps": 11, "max_epochs": -1}}  # 4 steps are an epoch
OPTIONS = [
    ("validation", IN_STEPS_OF_3 | EVERY_6),
    ("last batch", IN_STEPS_OF_3),
    ("epoch end", IN_STEPS_OF_3),
    ("second epoch", IN_STEPS_OF_3 | {"workers": 2}),
    ("middle", {"workers": 2}),
    ("last batch", {"workers": 2}),
    ("epoch end", {"workers": 2}),
    ("second epoch", {"drop_last": True}),
    ("epoch end", {"val_check_interval": 5, "check_val_every_n_epoch": None}),
    ("second epoch", {"limit_train_batches": 9}),
    ("middle", {"reload_dataloaders_every_n_epochs": 1}),
]


@pytest.mark.parametrize("name, options", OPTIONS, ids=str)
def test_resumed_run_sees_the_same_batches_with_options(tmp_path, name, options):
    check(tmp_path, *HOOKS[name], **({"end": END} | options))


@pytest.mark.parametrize("hook", ["on_train_end", "on_train_epoch_end"])
@pytest.mark.parametrize("steps", [5, EPOCH + 6])
def test_a_run_that_ended_within_an_epoch_goes_on_in_it(tmp_path, steps, hook):
    """Three epochs are three, whether or not max_steps or max_time ended the first run in the middle of one."""

    def data():
        return Counting(23, batch_size=2, seed=5)

    path = tmp_path / "checkpoint.ckpt"
    whole, trainer = fit(data(), max_epochs=3, limit_train_batches=11)
    before, _ = fit(data(), [SaveAndStop(hook, steps, path)], max_epochs=3, limit_train_batches=11, max_steps=steps)
    after, resumed = fit(data(), ckpt_path=path, max_epochs=3, limit_train_batches=11)
    assert before.seen + after.seen == whole.seen
    assert resumed.fit_loop.epoch_progress == trainer.fit_loop.epoch_progress


@pytest.mark.parametrize("drop_last, missing", [(False, 0), (True, 1)])
def test_drop_last_leaves_out_what_fills_no_batch(drop_last, missing):
    module, _ = fit(Counting(23, batch_size=2, drop_last=drop_last), max_epochs=1)
    assert len({sequence for _, _, batch in module.seen for sequence in batch}) == 23 - missing


# A step takes 6 sequences in each of these, and an epoch has 4 steps.
BATCHES = [(2, 3), (6, 1), (1, 6), (3, 2)]  # (batch size, batches of a step)
STEPS = {
    "middle": ("on_train_batch_end", 2),
    "last batch": ("on_train_batch_end", 4),
    "epoch end": ("on_train_epoch_end", 4),
    "second epoch": ("on_train_batch_end", 7),
}


class Validations(L.Callback):
    """Notes the optimiser steps after which validation ran."""

    def __init__(self):
        self.steps = []

    def on_validation_start(self, trainer, module):
        self.steps.append(trainer.global_step)


def fit_in_steps_of_6(index, callbacks=(), ckpt_path=None):
    """The sequences of each step, and the steps after which validation ran."""
    batch, accumulate = BATCHES[index]
    validations = Validations()
    module, _ = fit(
        Counting(24, batch_size=batch),
        [*callbacks, validations],
        ckpt_path,
        accumulate_grad_batches=accumulate,
        val_check_interval=3 * accumulate,
        check_val_every_n_epoch=None,
        max_steps=11,
    )
    found = {}
    for _, step, sequences in module.seen:
        found.setdefault(step, []).extend(sequences)
    return found, validations.steps


@pytest.mark.parametrize("before, after", [(0, 1), (1, 2), (2, 3), (3, 0)])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.cover(1)
def test_batch_size_may_change(tmp_path, before, after, name):
    hook, step = STEPS[name]
    path = tmp_path / "checkpoint.ckpt"
    whole, validated = fit_in_steps_of_6(before)
    start, validated_before = fit_in_steps_of_6(before, [SaveAndStop(hook, step * BATCHES[before][1], path)])
    rest, validated_after = fit_in_steps_of_6(after, ckpt_path=path)
    assert list(start) + list(rest) == list(range(11))
    assert start | rest == whole
    assert validated_before + validated_after == validated


DISTRIBUTED = """
import os, sys
import torch.distributed as dist
from counting import Counting
from test_exact_resume import SaveAndStop, fit

path, batches, checkpoint = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
callbacks = [SaveAndStop("on_train_batch_end", batches, path)] if batches else []
options = {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), "max_steps": 10}
data = Counting(23, batch_size=2, ddp=True)
try:
    module, _ = fit(data, callbacks, checkpoint, **options)
finally:
    print("SEEN", os.environ["RANK"], module.seen, flush=True)
"""


def run_ranks(ranks, tmp_path, *arguments):
    """For each step, the sequences that any of the ranks saw."""
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone", str(script)]
    output = subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True)
    found = {}
    for rank, seen in re.findall(r"SEEN (\d+) (\[.*\])", output.stdout):
        for _, step, sequences in ast.literal_eval(seen):
            found.setdefault(step, {})[int(rank)] = sequences
    assert all(set(by_rank) == set(range(ranks)) for by_rank in found.values()), output.stderr
    assert found, output.stderr
    return {step: sorted(itertools.chain(*by_rank.values())) for step, by_rank in found.items()}


@pytest.mark.slow
def test_two_ranks_go_on_from_one_and_one_from_two(tmp_path):
    """Steps of one rank take 2 sequences, those of two ranks 4; epochs of 23 are padded to 24 by two ranks."""
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    one = run_ranks(1, tmp_path, "none", 0)
    start = run_ranks(1, tmp_path, first, 4)
    middle = run_ranks(2, tmp_path, second, 2, first)
    rest = run_ranks(1, tmp_path, "none", 0, second)
    whole = [sequence for step in range(10) for sequence in one[step]]
    assert [start[step] for step in range(4)] == [one[step] for step in range(4)]
    assert middle[4] == sorted(one[4] + one[5]) and middle[5] == sorted(one[6] + one[7])
    assert rest[6] == one[8] and rest[7] == one[9]
    assert len(set(whole)) == 20
