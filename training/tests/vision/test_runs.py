"""Whole runs of the experiments on images, from their configurations."""

import pathlib

import hydra
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import run as command_line
from flash_attn.models.vit import VisionTransformer
from src.metrics.accuracy import AccuracyMine
from src.utils import resolvers
from src.utils.checkpoint import latest, load_checkpoint
from training.tests.vision.needs import needs_timm, needs_torchvision

CONFIGS = pathlib.Path(command_line.__file__).parent / "configs"
HERE = "training.tests.vision.test_runs"
QUIET = ["print_config=false", "trainer.accelerator=cpu", "logger=csv"]


def composed(folder, *overrides):
    resolvers.register()
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("config", [f"work_dir={folder}", *overrides])


def run(folder, *overrides):
    return command_line.run(composed(folder, *QUIET, *overrides))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)


def noisy(image):
    """An augmentation that is different each time."""
    return image + 0.5 * torch.randn_like(image)


def blended(images, targets):
    """A mixup of another kind: each image with its neighbour, by a ratio from numpy."""
    ratio = np.random.uniform(0.5, 1)
    onehot = torch.nn.functional.one_hot(targets, 4).float()
    return tuple(ratio * x + (1 - ratio) * x.roll(1, 0) for x in (images, onehot))


# ---------------------------------------------------------------------------------------------------------------------
# experiment=tiny/vision


@pytest.mark.parametrize("file_format", ["npy", pytest.param("png", marks=needs_torchvision)])
def test_tiny_vision_learns(tmp_path, file_format):
    options = [
        "experiment=tiny/vision",
        f"datamodule.file_format={file_format}",
        "+optimized_metric=test/acc",
        "datamodule.num_train=256",
        "datamodule.num_val=64",
    ]
    assert run(tmp_path, *options) > 0.9  # of 4 classes
    assert len(list((tmp_path / "data/gratings").glob("[!.]*"))) == 1  # besides the lock


@pytest.mark.parametrize("stopped_at, workers", [(4, 0), (6, 1)])  # after steps, of which an epoch has 4
def test_a_resumed_run_gives_the_same_weights(tmp_path, stopped_at, workers):
    options = [
        "experiment=tiny/vision",
        f"datamodule.num_workers={workers}",
        "datamodule.num_train=72",
        "datamodule.batch_size=16",
        "++datamodule.drop_last=true",
        "datamodule.num_val=8",
        "test_after_training=false",
        "++model.drop_path_rate=0.2",
        "++model.drop_rate=0.1",
        "trainer.max_epochs=3",
        "train.scheduler.t_initial=12",
        "train.scheduler.warmup_t=2",
        "callbacks.model_checkpoint.monitor=null",
        "++datamodule.num_aug_repeats=2",
        f"++datamodule.train_transforms={{_target_: {HERE}.noisy, _partial_: true}}",
        f"++datamodule.mixup={{_target_: {HERE}.blended, _partial_: true}}",
    ]
    save_at = "++callbacks.model_checkpoint.every_n_train_steps="
    run(tmp_path, *options, "name=whole", f"{save_at}12")
    run(tmp_path, *options, "name=resumed", f"{save_at}{stopped_at}", f"++trainer.max_steps={stopped_at}")
    run(tmp_path, *options, "name=resumed", f"{save_at}12", "resume=true")
    whole, resumed = (load_checkpoint(latest(tmp_path / f"checkpoints/{name}")) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys() and len(whole) > 20
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_some_batches_can_be_overfitted(tmp_path):
    options = ["++trainer.overfit_batches=2", "test_after_training=false", "+optimized_metric=train/acc"]
    assert run(tmp_path, "experiment=tiny/vision", *options) > 0.9


def test_images_that_do_not_fill_patches(tmp_path):
    with pytest.raises(
        hydra.errors.InstantiationException, match=r"img_size must be a multiple of patch_size, 8, found 30"
    ):
        run(tmp_path, "experiment=tiny/vision", "datamodule.image_size=30")


# ---------------------------------------------------------------------------------------------------------------------
# experiment=imagenet/...

SIZES = {"t": (192, 3), "s": (384, 6), "b": (768, 12)}


@pytest.mark.parametrize("memory, batches", [(16, (128, 128, 64)), (25, (128, 128, 128)), (82, (128, 128, 128))])
def test_the_recipe(tmp_path, memory, batches):
    """The values of DeiT: 1024 images a step, 300 epochs, a rate of 5e-4 for 512 images, 5 epochs of warm-up."""
    for size, batch in zip("tsb", batches):
        config = composed(tmp_path, f"experiment=imagenet/vit-{size}", f"train.gpu_mem={memory}")
        config = OmegaConf.to_container(config, resolve=True)
        steps_of_epoch = -(-1281167 // 1024)
        trainer, train, datamodule = config["trainer"], config["train"], config["datamodule"]
        assert (datamodule["batch_size"], trainer["accumulate_grad_batches"]) == (batch, 128 // batch)
        assert (trainer["max_epochs"], trainer["precision"], datamodule["num_aug_repeats"]) == (300, "bf16", 3)
        assert (train["optimizer"]["lr"], train["optimizer"]["weight_decay"]) == (5e-4 * 1024 / 512, 0.05)
        assert train["scheduler"]["t_initial"] == 300 * steps_of_epoch
        assert train["scheduler"]["warmup_t"] == 5 * steps_of_epoch
        mixup = {key: datamodule["mixup"][key] for key in ("mixup_alpha", "cutmix_alpha", "label_smoothing")}
        assert mixup == dict(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1)
        assert config["model"]["drop_path_rate"] == 0.1 and set(config["eval"]["metrics"]) == {"acc", "acctop5"}


@pytest.mark.parametrize("size", SIZES)
def test_the_models(tmp_path, size):
    config = OmegaConf.to_container(composed(tmp_path, f"experiment=imagenet/vit-{size}").model, resolve=False)
    with torch.device("meta"):
        model = hydra.utils.instantiate(config | dict(img_size=224, num_classes=1000))
    assert isinstance(model, VisionTransformer)
    assert (model.embed_dim, model.blocks[0].mixer.num_heads, len(model.blocks)) == (*SIZES[size], 12)
    assert model.blocks[0].mixer.use_flash_attn and model.fused_dropout_add_ln


def test_the_loss_takes_mixed_targets_in_bf16():
    """As the task computes it, against the formula in float64."""
    from src.tasks.seq import _loss

    logits, targets = torch.randn(6, 10), torch.rand(6, 10).softmax(dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(None)(logits.bfloat16(), targets)
    exact = -(targets.double() * logits.bfloat16().double().log_softmax(dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    assert AccuracyMine()(logits, targets) == (logits.argmax(dim=1) == targets.argmax(dim=1)).float().mean()


@needs_timm
def test_an_epoch_of_the_recipe(tmp_path):
    """experiment=imagenet/vit-t as it is, but for the size of the images and the model, on a small image folder."""
    from src.datamodules.gratings import write_gratings

    write_gratings(
        tmp_path / "data/imagenet", num_train=48, num_val=12, num_classes=6, image_size=40, file_format="png"
    )
    accuracy = run(
        tmp_path,
        "experiment=imagenet/vit-t",
        "trainer.devices=1",
        "trainer.max_epochs=2",
        "datamodule.batch_size=8",
        "train.global_batch_size=16",
        "datamodule.image_size=32",
        "datamodule.num_workers=2",
        "datamodule.num_classes=6",
        "++model.depth=1",
        "++model.embed_dim=24",
        "callbacks=[default,ema]",
        "callbacks.ema.decay=0.9",
        "+optimized_metric=test/acctop5",
    )
    assert 0 <= accuracy <= 1
    assert (tmp_path / "checkpoints").exists()
