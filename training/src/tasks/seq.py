"""What is trained: models of sequences, their loss, and what is logged."""

import inspect
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchmetrics import MetricCollection
from transformers import get_linear_schedule_with_warmup

from flash_attn.context_parallel import Plan
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss
from flash_attn.models.gpt import GPTLMHeadModel
from src.callbacks.loggers import is_logging_step
from src.engines import MeshStrategy, whole_on_first_process
from src.metrics.accuracy import AccuracyMine
from src.metrics.epoch import EpochTotals
from src.metrics.loss import MeanLoss
from src.metrics.num_tokens import NumTokens
from src.metrics.perplexity import Perplexity
from src.optim.param_grouping import group_parameters_for_optimizer
from src.optim.timm_lr_scheduler import TimmCosineLRScheduler
from src.utils import resolvers, utils
from src.utils.checkpoint import load_checkpoint
from src.utils.distributed import tensor_parallel_size
from src.utils.modules import is_meta, load_weights

log = utils.get_logger(__name__)

# Losses that train.loss_fn may name; null is the first.
LOSSES = {"torch": torch.nn.CrossEntropyLoss, "fused": CrossEntropyLoss, "linear": LinearCrossEntropyLoss}
_EXPECTED = "expected_gradient"  # of the loss, in a checkpoint
_SCHEDULERS = (TimmCosineLRScheduler, get_linear_schedule_with_warmup)  # which experiments give options for
_WITHOUT_LOGITS = (MeanLoss, NumTokens, Perplexity)
_DIVIDED_DOCUMENTS = "datamodule.separate_documents must be false with context_parallel_size above 1, found true"


class SequenceModel(L.LightningModule):
    """A model of sequences with a label each: batches are (x, y) or (x, y, lengths).

    Arguments:
        cfg: the whole configuration of a run: datamodule, model, train and eval are read.
        model_cfg: a model in place of cfg.model.

    The data is prepared first, so that ${datamodule:vocab_size} is known to the rest of the configuration.
    Raises ValueError if cfg has no model or no data.
    Attributes: `model` is the model itself, `train_metrics`, `val_metrics` and `test_metrics` are MetricCollections.
    """

    def __init__(self, cfg: DictConfig, model_cfg: DictConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.model_cfg = cfg.get("model") if model_cfg is None else model_cfg
        for key, config in (("model", self.model_cfg), ("datamodule", cfg.get("datamodule"))):
            if not config or "_target_" not in config:
                raise ValueError(f"{key} must have a _target_, found none: give {key}=... or experiment=...")
        self.instantiate_datamodule()
        self.save_hyperparameters(OmegaConf.to_container(cfg, resolve=True))
        self.instantiate_model()
        self.warmstart()
        self.instantiate_loss()
        self.instantiate_metrics()

    def instantiate_datamodule(self) -> None:
        self._datamodule = instantiate(self.cfg.datamodule, _convert_="all")
        self._datamodule.prepare_data()  # called in all processes, done by one
        self._datamodule.setup()
        resolvers.attach_datamodule(self._datamodule)

    def instantiate_model(self) -> None:
        recursive = self.model_cfg.get("_recursive_", False)
        with whole_on_first_process(self.cfg.get("trainer") or {}):
            self.model = instantiate(self.model_cfg, _recursive_=recursive, _convert_="all")
        options = self.cfg.train.get("compile")
        if options:
            self.model.compile(**(options if isinstance(options, Mapping) else {}))

    def warmstart(self) -> None:
        """Load the weights of train.warmstart.path, through the function train.warmstart.post_process if there is one.

        With train.warmstart.strict=False, weights that are missing or not known are logged and not an error.
        """
        options = self.cfg.train.get("warmstart")
        if options is None or is_meta(self.model):
            return
        weights = load_checkpoint(options.path)
        if options.get("post_process") is not None:
            weights = instantiate(options.post_process, _partial_=True)(weights)
        what = f"train.warmstart.path={options.path}"
        missing, unexpected = load_weights(self.model, weights, what, strict=options.get("strict", True))
        if missing or unexpected:
            log.warning("Warm start: no weights for %s; the model has no parameters for %s", missing, unexpected)
        log.info("Warm start with the weights of %s", options.path)

    def instantiate_loss(self) -> None:
        train = self.cfg.train
        self.loss_fn = _loss(train.get("loss_fn"))
        self.loss_fn_val = _loss(train.loss_fn_val) if train.get("loss_fn_val") is not None else self.loss_fn

    def instantiate_metrics(self) -> None:
        configs = OmegaConf.select(self.cfg, "eval.metrics") or {}
        metrics = {name: instantiate(config, _convert_="all") for name, config in configs.items()}
        collection = MetricCollection(
            {"loss": MeanLoss(), **(metrics or {"acc": AccuracyMine()})}, compute_groups=False
        )
        self.train_metrics, self.val_metrics, self.test_metrics = (
            collection.clone(prefix=f"{phase}/") for phase in ("train", "val", "test")
        )
        for metrics in (self.val_metrics, self.test_metrics):
            for metric in metrics.values():
                if isinstance(metric, NumTokens):
                    metric.of_each_epoch()
        self.train_totals = EpochTotals(self.train_metrics, "train_metrics")

    def setup(self, stage: str) -> None:
        for metrics in (self.train_metrics, self.val_metrics, self.test_metrics):
            for metric in metrics.values():
                if isinstance(metric, NumTokens):
                    metric.copies = tensor_parallel_size(self.trainer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def step(self, batch: Any, is_train: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
        """The loss of a batch, the model's output and the targets; both have a row for each target."""
        x, y, *lengths = batch
        output = self(x, lengths=lengths[0]) if lengths else self(x)
        return (self.loss_fn if is_train else self.loss_fn_val)(output, y), output, y

    def shared_step(self, batch: Any, batch_idx: int, phase: str = "train") -> dict[str, Tensor | None]:
        """Loss, output and targets of a batch. Logs <phase>/loss and <phase>/<name of metric>.

        Nothing here waits for the device: losses and counts are added up there, and read when they are logged.
        """
        training = phase == "train"
        loss, output, targets = self.step(batch, is_train=training)
        metrics = getattr(self, f"{phase}_metrics")
        on_step = training and bool(OmegaConf.select(self.cfg, "eval.log_on_step"))
        if on_step:
            metrics["loss"].over_ranks = is_logging_step(self.trainer)
            metrics(output, targets, loss=loss.detach())
        else:
            metrics.update(output, targets, loss=loss.detach())
        if training and not self.trainer.fit_loop._should_accumulate():
            self.train_totals.note(self.trainer.global_step + 1)
        for name, metric in metrics.items():
            self.log(name, metric, on_step=on_step, on_epoch=True, batch_size=len(targets))
        plan = self.plan_of(batch[0])
        if training and plan is not None:  # gradients average to those of the mean over all tokens
            count = (targets != -100).sum()
            loss = plan.mean_loss(torch.where(count > 0, loss, 0.0) * count, count)
        return {"loss": loss, "output": output, "targets": targets}

    def plan_of(self, x: Tensor) -> Plan | None:
        """How the tokens of samples x (batch, tokens) are divided over processes; None if they are not."""
        strategy = None if self._trainer is None else self._trainer.strategy
        return strategy.plan(x.shape[1]) if isinstance(strategy, MeshStrategy) else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, batch_idx, "train")["loss"]  # Lightning would keep an output for another step

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor | None]:
        return self.shared_step(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor | None]:
        return self.shared_step(batch, batch_idx, "test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.train_totals.save(self.trainer, checkpoint)
        if isinstance(self.loss_fn, CrossEntropyLoss):
            checkpoint[_EXPECTED] = self.loss_fn.expected_gradient

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.train_totals.load(checkpoint)
        if isinstance(self.loss_fn, CrossEntropyLoss):
            self.loss_fn.expected_gradient = checkpoint.get(_EXPECTED)

    def on_train_start(self) -> None:
        self.train_totals.begin(self.trainer)

    def on_fit_start(self) -> None:
        wanted = self.cfg.train.get("global_batch_size")
        if wanted is None:
            return
        replicas = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        batch, accumulated = self.cfg.datamodule.batch_size, self.trainer.accumulate_grad_batches
        if replicas * batch * accumulated != wanted:
            log.warning(
                "The global batch has %d sequences, %d processes x datamodule.batch_size=%d x %d accumulated batches, "
                "not train.global_batch_size=%d, which is no multiple of processes x datamodule.batch_size",
                replicas * batch * accumulated,
                replicas,
                batch,
                accumulated,
                wanted,
            )

    def configure_optimizers(self) -> Any:
        train = self.cfg.train
        parameters = self.parameters()
        if "optimizer_param_grouping" in train:
            parameters = group_parameters_for_optimizer(self.model, train.optimizer, **train.optimizer_param_grouping)
        self._check_optimizer(train.optimizer)
        optimizer = instantiate(train.optimizer, parameters, _convert_="all")
        for i, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in group.items() if k in ("lr", "weight_decay") or k not in optimizer.defaults}
            sizes = [p.numel() for p in options.pop("params")]
            if sizes:
                log.info("Parameter group %d: %d tensors, %d parameters, %s", i, len(sizes), sum(sizes), options)
        if "_target_" not in (train.get("scheduler") or {}):
            if train.get("scheduler"):  # options that an experiment gives, whatever the group `scheduler` selects
                log.warning("Without a scheduler, train.scheduler.%s have no effect", ", ".join(train.scheduler))
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": _scheduler(train.scheduler, optimizer),
                "interval": train.get("scheduler_interval", "step"),
                "monitor": train.get("scheduler_monitor", "val/loss"),
            },
        }

    def _check_optimizer(self, optimizer):
        """Raise ValueError for an optimiser that a strategy does not go with."""
        parts = 1 if self._trainer is None else tensor_parallel_size(self._trainer)
        if parts > 1 and optimizer["_target_"].endswith(".Muon"):
            raise ValueError(
                "optimizer=muon orthogonalises whole matrices and must not be used with tensor_parallel_size above 1, "
                f"found {parts}: give strategy=fsdp or optimizer=adamw"
            )
        if "ZeroRedundancyOptimizer" not in optimizer["_target_"]:
            return
        if not dist.is_initialized():
            raise ValueError(
                "optimizer=adamw-zero divides its state over processes and needs strategy=zero1, found none"
            )
        if isinstance(self.trainer.strategy, MeshStrategy):
            raise ValueError(
                "optimizer=adamw-zero must not be used with a strategy that divides the model and with it the state of "
                f"any optimizer, such as optimizer=adamw, found strategy {self.trainer.strategy.strategy_name}"
            )


class SequenceLMModel(SequenceModel):
    """A language model: y is x shifted by one token, and every token counts. Batches are (x, y), or (x, y, cu_seqlens)
    of rows with documents that do not see each other.

    With train.loss_fn=linear, the loss is computed from the model's hidden states, without logits of all tokens.
    """

    def instantiate_model(self) -> None:
        super().instantiate_model()
        ids = getattr(self._datamodule, "vocab_size", None)
        vocab_size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        if ids is not None and vocab_size is not None and vocab_size < ids:
            raise ValueError(
                f"model.config.vocab_size must be at least {ids}, the number of ids that the tokenizer has, found "
                f"{vocab_size}; ${{datamodule:vocab_size}} stands for that number"
            )

        if getattr(self._datamodule, "separate_documents", False):
            if not isinstance(self.model, GPTLMHeadModel) or not self.model.transformer.use_flash_attn:
                raise ValueError(
                    "datamodule.separate_documents must be false for this model, found true: only flash_attn's "
                    f"GPTLMHeadModel with model.config.use_flash_attn keeps documents apart, not "
                    f"{type(self.model).__name__}"
                )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        divided = getattr(self.trainer.strategy, "context_parallel_size", 1) > 1
        if divided and getattr(self._datamodule, "separate_documents", False):
            raise ValueError(_DIVIDED_DOCUMENTS)

    def instantiate_metrics(self) -> None:
        super().instantiate_metrics()
        if not any(isinstance(f, LinearCrossEntropyLoss) for f in (self.loss_fn, self.loss_fn_val)):
            of_logits = self.loss_fn
            at_once = isinstance(of_logits, CrossEntropyLoss) and of_logits.gradient_in_forward
            if at_once and of_logits.inplace_backward:
                self._refuse_metrics_of_logits(
                    "train.loss_fn with gradient_in_forward and inplace_backward overwrites the logits"
                )
            return
        if not isinstance(self.model, GPTLMHeadModel):
            raise ValueError(
                "train.loss_fn=linear needs a model that computes the loss itself, flash_attn's GPTLMHeadModel; "
                f"found {type(self.model).__name__} as model._target_"
            )
        self._refuse_metrics_of_logits("train.loss_fn=linear has no logits")

    def _refuse_metrics_of_logits(self, why: str) -> None:
        for name, metric in self.train_metrics.items(keep_base=True):
            if not isinstance(metric, _WITHOUT_LOGITS):
                raise ValueError(f"{why}, which eval.metrics.{name} needs")

    def step(self, batch: Any, is_train: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
        """The mean loss of all tokens, logits (tokens, classes) or None with a linear loss, and targets (tokens,)."""
        x, y, *cu_seqlens = batch
        loss_fn = self.loss_fn if is_train else self.loss_fn_val
        plan, options = self.plan_of(x), dict(cu_seqlens=cu_seqlens[0]) if cu_seqlens else {}
        if plan is not None:
            if cu_seqlens:
                raise ValueError(_DIVIDED_DOCUMENTS)
            x, y, options = plan.shard(x), plan.shard(y, fill=-100), dict(cp_plan=plan)
        targets = y.flatten()
        if isinstance(loss_fn, LinearCrossEntropyLoss):
            return self(x, shift_labels=y, loss_fn=loss_fn, **options).loss, None, targets
        logits = self(x, **options).logits.flatten(0, -2)
        return loss_fn(logits, targets), logits, targets


def _scheduler(config, optimizer):
    """The scheduler that a configuration describes.

    An experiment gives options for a scheduler of its own, and they stay where the command line selects another one.
    Those of ours that it does not take are left out; any other is still an error.
    """
    taken = inspect.signature(get_object(config["_target_"])).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        others = {name for each in _SCHEDULERS for name in inspect.signature(each).parameters}
        left_out = sorted((others & set(config)) - set(taken))
        if left_out:
            log.warning("With %s, train.scheduler.%s have no effect", config["_target_"], ", ".join(left_out))
            config = {name: value for name, value in config.items() if name not in left_out}
    return instantiate(config, optimizer, _convert_="all")


def _loss(config):
    """The loss that a configuration describes, or a name; cross entropy if None."""
    if config is None:
        config = "torch"
    if not isinstance(config, str):
        return instantiate(config, _convert_="all")
    if config not in LOSSES:
        raise ValueError(f"train.loss_fn must have a _target_ or be one of {', '.join(LOSSES)}, found {config!r}")
    return LOSSES[config]()
