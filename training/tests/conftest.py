"""What the tests of the harness share."""

import functools
import os
import pickle

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_is_parsed_or_composed_twice():
    """Hydra parses some thirty files for each configuration, and the same interpolations in them, for most of its time.

    And many tests compose the same configuration, of files that stay as they are.
    """
    omegaconf = pytest.importorskip("omegaconf")
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from omegaconf import _utils, base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf.OmegaConf, "load", _loaded_once(omegaconf.OmegaConf.load))
        patch.setattr(ConfigLoaderImpl, "load_configuration", _composed_once(ConfigLoaderImpl.load_configuration))
        for module in (base, _utils):
            patch.setattr(module, "parse", functools.cache(module.parse))
        yield


def _loaded_once(load):
    parsed = {}

    def load_once(file):
        if not hasattr(file, "fileno"):
            return load(file)
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in parsed:
            parsed[key] = pickle.dumps(load(file))
        return pickle.loads(parsed[key])  # a copy

    return load_once


def _composed_once(compose):
    composed = {}

    def compose_once(self, *args, **kwargs):
        folders = [(each.provider, each.path) for each in self.config_search_path.get_path()]
        key = repr((folders, args, kwargs, os.getcwd()))
        if key not in composed:
            composed[key] = pickle.dumps(compose(self, *args, **kwargs))
        return pickle.loads(composed[key])

    return compose_once
