"""The seed of torch's global random numbers."""

import torch


def seed_all(number: int) -> None:
    """Call torch.manual_seed, for CUDA only where it runs: calls keep stack traces (0.7 ms)."""
    if torch.cuda.is_initialized() or torch.backends.mps.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
