"""The names of datasets and classes, without torch: wrong ones are refused before any loading."""

from collections.abc import Sequence
from pathlib import Path

from certcli.system.errors import DataError, one_line, raise_if
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
    raise_if(
        name.startswith("torch/"), DataError, f"unknown dataset '{name}'", one_of(name, TORCHVISION)
    )
    try:
        is_folder = Path(name).resolve().is_dir()
    except (OSError, ValueError) as failure:
        raise DataError(
            f"cannot read folder {one_line(name)} ({one_line(failure)})",
            "check name and permissions",
        ) from failure
    raise_if(
        not is_folder,
        DataError,
        f"unknown dataset '{name}'",
        f"{one_of(name, (DIGITS, PHOTOGRAPHS, *TORCHVISION))}, or a folder of class folders",
    )


def names_of_classes(
    classes: int, in_record: Sequence[str] | None, of_dataset: Sequence[str] = ()
) -> list[str]:
    """Return a name for each of the k classes; their numbers where nobody names them."""
    names = known_class_names(classes, in_record, of_dataset)
    return names or [str(number) for number in range(classes)]


def known_class_names(
    classes: int, in_record: Sequence[str] | None, of_dataset: Sequence[str] = ()
) -> list[str] | None:
    """Return a name for each of the k classes: as the checkpoint states, else ImageNet's, else the
    dataset's; None where nobody names them.
    """
    if in_record is not None and len(in_record) == classes:
        return list(in_record)
    if classes == 1000:
        import certcli.system.compat  # noqa: F401

        # isort: split
        from timm.data import ImageNetInfo

        info = ImageNetInfo("imagenet-1k")
        return [info.index_to_description(number).split(",")[0] for number in range(classes)]
    return list(of_dataset) if len(of_dataset) == classes else None
