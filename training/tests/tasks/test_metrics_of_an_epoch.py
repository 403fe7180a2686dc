"""The metrics of an epoch are those of all its batches, also if the run was interrupted on its way."""

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from processes import over_processes

from src import engines
from src.callbacks.model_checkpoint import ModelCheckpointMine
from src.metrics import epoch
from src.metrics.num_tokens import NumTokens
from src.tasks.seq import SequenceLMModel
from src.utils import checkpoint as checkpoints
from training.tests.engines.test_engines import Started
from training.tests.engines.test_resume import AtBatch, fail
from training.tests.engines.tiny import SaveAt
from training.tests.standins import small

BATCHES = 20  # of an epoch, with two sequences each
NAMES = ("train/loss_epoch", "train/ppl_epoch", "train/num-tokens_epoch")


class Rows(Logger):
    """Keeps the metrics of epochs in memory, by the step at which they were logged."""

    name = version = None

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        if NAMES[0] in metrics:
            self.rows[step] = {name: metrics[name] for name in NAMES}

    def log_hyperparams(self, params):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, lines in (("train", 40), ("valid", 4)):
        (folder / f"{name}.txt").write_text("".join(f"word {7 * i % 90:3} of all\n" for i in range(lines)) + "end")
    return folder


def run(folder, max_steps, group=None, ckpt_path=None, callbacks=(), accumulate=1):
    """The metrics of the epochs of a run, by their last step."""
    ranks = 1 if group is None else group.size()
    L.seed_everything(1)
    config = small(
        "datamodule._target_=src.datamodules.language_modeling_hf.LMDataModule",
        "+datamodule.loader_workers=0",
        f"datamodule.dataset_name={folder}/*.txt",
        f"datamodule.cache_dir={folder}/cache",
        f"datamodule.batch_size={2 // ranks}",
        "train.optimizer.lr=0.01",
        "train.scheduler.t_initial=60",
        *(f"+model.config.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
    )
    task, rows = SequenceLMModel(config), Rows()
    strategy = (
        engines.strategy("single", "cpu", 1)
        if group is None
        else engines.DDPStrategy(cluster_environment=Started(group))
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=rows,
        max_steps=max_steps,
        callbacks=[*callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        use_distributed_sampler=False,
        default_root_dir=folder,
        log_every_n_steps=4,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(task, datamodule=task._datamodule, ckpt_path=ckpt_path)
    assert trainer.num_training_batches == BATCHES
    return rows.rows


@pytest.mark.parametrize("accumulate, step", [(1, 7), (1, BATCHES - 1), (1, BATCHES), (1, BATCHES + 1), (3, 4)])
def test_a_resumed_epoch_counts_from_its_start(accumulate, step, folder, tmp_path):
    last = 2 * BATCHES // accumulate
    whole = run(folder, last, callbacks=[SaveAt(step, tmp_path)], accumulate=accumulate)
    resumed = run(folder, last, ckpt_path=tmp_path / f"step_{step}.ckpt", accumulate=accumulate)
    assert len(whole) == 2 and set(resumed) <= set(whole) and max(resumed) == max(whole)
    for end, metrics in resumed.items():
        assert metrics == pytest.approx(whole[end], rel=1e-12)


def test_an_epoch_that_max_steps_has_cut_goes_on(folder, tmp_path):
    """The run ends and logs its part of the epoch; one that goes on logs all of it."""
    whole = run(folder, BATCHES)
    save = L.pytorch.callbacks.LambdaCallback(
        on_train_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "end.ckpt")
    )
    (part,) = run(folder, 9, callbacks=[save]).values()
    (resumed,) = run(folder, BATCHES, ckpt_path=tmp_path / "end.ckpt").values()
    assert (
        resumed == pytest.approx(whole[BATCHES - 1], rel=1e-12)
        and part["train/loss_epoch"] > resumed["train/loss_epoch"]
    )


def test_batches_after_the_last_step_of_a_run_that_failed_count_once(folder, tmp_path):
    whole = run(folder, BATCHES // 3, accumulate=3)
    saver = ModelCheckpointMine(tmp_path, fault_tolerant=True)
    with pytest.raises(RuntimeError, match="failed"):
        run(folder, BATCHES // 3, callbacks=[AtBatch(8, fail), saver], accumulate=3)
    resumed = run(folder, BATCHES // 3, ckpt_path=checkpoints.latest(tmp_path), accumulate=3)
    assert resumed[5] == pytest.approx(whole[5], rel=1e-12)


def test_a_checkpoint_with_counts_of_validation_goes_on(folder, tmp_path, monkeypatch):
    """Older checkpoints have them, and a run does not store or read them any more."""
    with monkeypatch.context() as patch:
        patch.setattr(NumTokens, "of_each_epoch", lambda self: None)
        (whole,) = run(folder, BATCHES, callbacks=[SaveAt(7, tmp_path)]).values()
    path = tmp_path / "step_7.ckpt"
    assert f"{checkpoints.WEIGHTS}val_metrics.num-tokens.count" in checkpoints.Checkpoint(path).entries
    (resumed,) = run(folder, BATCHES, ckpt_path=path).values()
    assert resumed == pytest.approx(whole, rel=1e-12)


def check_two_ranks(group, folder, path, whole):
    (resumed,) = run(folder, BATCHES, group, ckpt_path=path).values()
    assert resumed == pytest.approx(whole, rel=1e-6)


def test_another_number_of_ranks_goes_on(folder, tmp_path):
    whole = run(folder, BATCHES, callbacks=[SaveAt(7, tmp_path)])[BATCHES - 1]
    over_processes(2, check_two_ranks, folder, tmp_path / "step_7.ckpt", whole)


def check_sums(group):
    """A sum over ranks, as each save takes one, leaves the ranks' own sums alone."""
    for dtype in (torch.float64, torch.int64):
        own = torch.tensor(group.rank() + 1, dtype=dtype)
        assert [epoch._over_ranks(own) for _ in range(2)] == [3.0, 3.0]
        assert own.item() == group.rank() + 1


def test_sums_over_ranks_can_be_taken_again():
    over_processes(2, check_sums)
