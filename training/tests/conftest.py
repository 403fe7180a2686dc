"""What the tests of the harness share."""

import os
import pickle

import pytest


@pytest.fixture(scope="session", autouse=True)
def files_are_parsed_once():
    """Hydra parses some thirty files for each configuration, mostly the same ones, for half of the time that it takes.

    A file that has changed is another one.
    """
    omegaconf = pytest.importorskip("omegaconf")
    load, parsed = omegaconf.OmegaConf.load, {}

    def load_once(file):
        if not hasattr(file, "fileno"):
            return load(file)
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in parsed:
            parsed[key] = pickle.dumps(load(file))
        return pickle.loads(parsed[key])  # a copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf.OmegaConf, "load", load_once)
        yield
