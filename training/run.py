"""Train or evaluate as the configuration says: python run.py experiment=owt/gpt2s-flash trainer.devices=8

The configuration is in configs/. The key `run` says what is done: train (the default), eval, prepare, generate, export.
"""

import hydra
from omegaconf import DictConfig, OmegaConf
from src.utils import resolvers

resolvers.register()


@hydra.main(config_path="configs", config_name="config", version_base="1.3")
def main(config: DictConfig) -> float | None:
    config = OmegaConf.create(without_private_keys(OmegaConf.to_container(config, resolve=True)))
    if config.run == "train":
        from src.train import train

        return train(config)
    raise ValueError(f"run must be train, found {config.run!r}")


def without_private_keys(config):
    """The configuration without keys that begin with two underscores, at any depth."""
    if isinstance(config, dict):
        return {k: without_private_keys(v) for k, v in config.items() if not str(k).startswith("__")}
    return [without_private_keys(v) for v in config] if isinstance(config, list) else config


if __name__ == "__main__":
    main()
