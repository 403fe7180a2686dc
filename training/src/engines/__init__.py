"""Engines: how a model is run on one or more devices. Each is a strategy of Lightning with exact resume.

    trainer = L.Trainer(strategy=FSDPStrategy(), devices=8)             # or strategy="ddp_zero1" and so on
    trainer.fit(task, datamodule=data, ckpt_path=latest("checkpoints/run"))

| name | class | what each process has |
|---|---|---|
| single | SingleDeviceStrategy | the model |
| ddp | DDPStrategy | a copy |
| ddp_zero1 | DDPStrategyZero1 | a copy, and a share of the optimiser's states |
| ddp_zero2 | DDPStrategyZero2 | parts of parameters, gradients, states; whole layers from forward to backward |
| fsdp | FSDPStrategy | parts of parameters, gradients, states |
| tp | TensorParallelStrategy | a part of each layer |

Once this is imported, Lightning takes these names for these classes, "ddp" included.
"""

from lightning.pytorch.strategies import StrategyRegistry

from src.engines.fsdp import FSDPStrategy
from src.engines.mesh import TensorParallelStrategy
from src.engines.strategies import DDPStrategy, SingleDeviceStrategy
from src.utils.ddp_zero1 import DDPStrategyZero1
from src.utils.ddp_zero2 import DDPStrategyZero2

__all__ = [
    "STRATEGIES", "DDPStrategy", "DDPStrategyZero1", "DDPStrategyZero2", "FSDPStrategy", "SingleDeviceStrategy",
    "TensorParallelStrategy",
]  # fmt: skip

STRATEGIES = {
    each.strategy_name: each
    for each in (
        SingleDeviceStrategy, DDPStrategy, DDPStrategyZero1, DDPStrategyZero2, FSDPStrategy, TensorParallelStrategy,
    )
}  # fmt: skip
for _name, _class in STRATEGIES.items():
    StrategyRegistry.register(_name, _class, description=(_class.__doc__ or "").partition("\n")[0], override=True)
