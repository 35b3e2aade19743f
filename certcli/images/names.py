"""The names of datasets, without torch: a wrong one is refused before anything is loaded."""

from pathlib import Path

from certcli.system.errors import DataError, one_line
from certcli.system.registry import one_of

DIGITS = "digits"
PHOTOGRAPHS = "photographs"
TORCHVISION = {
    "torch/mnist": "MNIST",
    "torch/fashion_mnist": "FashionMNIST",
    "torch/kmnist": "KMNIST",
    "torch/cifar10": "CIFAR10",
    "torch/cifar100": "CIFAR100",
}


def require_named(name: str) -> None:
    """Raise DataError for a name that is no dataset's and no folder's."""
    if name in (DIGITS, PHOTOGRAPHS, *TORCHVISION):
        return
    if name.startswith("torch/"):
        raise DataError(f"unknown dataset '{name}'", one_of(name, TORCHVISION))
    try:
        is_folder = Path(name).resolve().is_dir()
    except (OSError, ValueError) as failure:
        raise DataError(
            f"cannot read folder {one_line(name)} ({one_line(failure)})",
            "check name and permissions",
        ) from failure
    if not is_folder:
        raise DataError(
            f"unknown dataset '{name}'",
            f"{one_of(name, (DIGITS, PHOTOGRAPHS, *TORCHVISION))}, or a folder of class folders",
        )
