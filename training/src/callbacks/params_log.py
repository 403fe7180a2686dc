"""How many parameters a model has."""

import lightning as L

from src.callbacks.loggers import log_hyperparams


class ParamsLog(L.Callback):
    """Logs numbers of parameters as hyper-parameters, when training begins.

    Arguments:
        total_params_log, trainable_params_log, non_trainable_params_log: whether to log `model/params_total`,
            `model/params_trainable`, `model/params_not_trainable`.
    """

    def __init__(
        self,
        total_params_log: bool = True,
        trainable_params_log: bool = True,
        non_trainable_params_log: bool = True,
    ) -> None:
        self.total_params_log = total_params_log
        self.trainable_params_log = trainable_params_log
        self.non_trainable_params_log = non_trainable_params_log

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainable = sum(p.numel() for p in pl_module.parameters() if p.requires_grad)
        total = sum(p.numel() for p in pl_module.parameters())
        counts = {
            "model/params_total": (self.total_params_log, total),
            "model/params_trainable": (self.trainable_params_log, trainable),
            "model/params_not_trainable": (self.non_trainable_params_log, total - trainable),
        }
        log_hyperparams(trainer, {name: count for name, (wanted, count) in counts.items() if wanted})
