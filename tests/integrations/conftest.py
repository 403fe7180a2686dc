"""Each integration is tested with the libraries that it serves: without these, there is nothing to collect."""

import importlib.util

NEEDS = {
    "continuous_batching": ["transformers"],
    "transformers": ["transformers"],
    "diffusers": ["diffusers"],
    "training_libraries": ["accelerate", "datasets", "peft", "transformers", "trl"],
}
collect_ignore = [
    f"test_{name}.py" for name, needs in NEEDS.items() if any(importlib.util.find_spec(each) is None for each in needs)
]
