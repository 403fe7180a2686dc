"""Samplers that know how far they are, so that training can go on in the middle of an epoch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

_CHUNK = 1 << 16  # indices that are Python integers at a time: an epoch of a large corpus has 10^8


class RandomFaultTolerantSampler(RandomSampler):
    """A RandomSampler with a state, for one process.

    Arguments: those of RandomSampler. Without a generator it makes its own, seeded from torch's global one.

    The state is {"random_state": that of the generator before the permutation of this epoch, "counter": how many of its
    indices were given out}. The iteration after `load_state_dict` gives the rest of that permutation; `len` remains
    that of an epoch.
    """

    def __init__(self, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> None:
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        super().__init__(*args, generator=generator, **kwargs)
        self.random_state = generator.get_state()
        self.counter = 0
        self._skip = 0  # how many indices the next iteration leaves out

    def state_dict(self) -> dict[str, Any]:
        return {"random_state": self.random_state, "counter": self.counter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.set_state(state_dict["random_state"])
        self.random_state = state_dict["random_state"]
        self.counter = self._skip = state_dict["counter"]

    def __iter__(self) -> Iterator[int]:
        self.random_state = self.generator.get_state()
        self.counter, self._skip = self._skip, 0
        for index in itertools.islice(super().__iter__(), self.counter, None):
            self.counter += 1
            yield index
        self.random_state, self.counter = self.generator.get_state(), 0


class FaultTolerantDistributedSampler(DistributedSampler):
    """A DistributedSampler with a state, which another number of ranks can go on from.

    Arguments: those of DistributedSampler, which gives the same indices as long as no state is loaded.

    An epoch has an order of the whole data set that only the seed and the epoch determine. Rank r of w takes entries
    r, r + w, r + 2 w and so on of what remains of it. So when each of w ranks has taken k indices, the first k * w of
    the order are done, and any number of ranks can divide what comes after them. At the end, the order is padded with
    its beginning, or cut if drop_last is given, so that all ranks have equally many.

    The state is {"epoch": int, "counter": how many indices of it this rank has given out}. `load_state_dict` also
    takes {"epoch": int, "samples": how many all ranks have given out}. The iteration after it gives the rest of that
    epoch; `len` remains that of a whole epoch.

    >>> sampler = FaultTolerantDistributedSampler(range(6), num_replicas=2, rank=0, shuffle=False)
    >>> sampler.load_state_dict({"epoch": 0, "samples": 2})
    >>> list(sampler), list(sampler)
    ([2, 4], [0, 2, 4])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counter = 0
        self._start = 0  # samples of the order that the next iteration leaves out

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "counter": self.counter}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.epoch = state_dict["epoch"]
        self._start = state_dict["samples"] if "samples" in state_dict else state_dict["counter"] * self.num_replicas
        self.counter = self._start // self.num_replicas

    def remaining(self, start: int) -> int:
        """How many indices each rank takes of an epoch after the first `start` samples of its order."""
        left = max(len(self.dataset) - start, 0)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        self.counter = start // self.num_replicas
        for chunk in self._indices(start).split(_CHUNK):
            for index in chunk.tolist():
                self.counter += 1
                yield index
        self.counter = 0

    def _indices(self, start: int) -> Tensor:
        """int64 indices that this rank takes after the first `start` samples of the epoch."""
        samples, ranks = len(self.dataset), self.num_replicas
        positions = start + self.rank + ranks * torch.arange(self.remaining(start))
        if samples:
            positions %= samples  # the padding is the beginning of the order
        if not self.shuffle:
            return positions
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(samples, generator=generator)[positions]
