"""The small networks on which SpecFormer's and the Cauchy paper's comparisons are made."""

from dataclasses import dataclass

from benchmarks.tables.layout import SOUND, Column

BOUND = Column("upper", "bound", "power", SOUND)

_CIFAR = "--dataset {cifar10}"
_MLP = "--arch-arg depth=2 --arch-arg embed_dim=64 --arch-arg num_heads=4 --arch-arg patch_size=8"


@dataclass(frozen=True)
class Small:
    """A small network on a small data set, on which a comparison of many runs can be made. epochs:
    of one gradient each.
    """

    name: str
    label: str
    init: str
    images: str
    train: str
    limit: int
    epochs: int
    seeds: tuple[int, ...]
    quick: bool
    radius: str = ""

    def made(self, options: str = "", arguments: str = "", halved: bool = False) -> dict[str, str]:
        epochs = self.epochs // 2 if halved else self.epochs
        return {
            "init": f"certvit init {self.init}{arguments} --seed {{seed}} -o init.safetensors --force",
            "train": f"certvit finetune init.safetensors {self.images} --loss ce --optimiser adamw {self.train} "
            f"--epochs {epochs}{options} --seed {{seed}} -o net.safetensors --force",
        }

    def judged(self, preset: str) -> dict[str, str]:
        radius = f" -e {self.radius}" if self.radius else ""
        return {
            "attack": f"{self.attack} --preset {preset}{radius}",
            "bound": "certvit lipschitz net.safetensors --no-estimate",
        }

    def judged_as_by_cauchy(self) -> dict[str, str]:
        """The paper's preset, or where images bear other radii its PGDs at those."""
        bound = {
            "bound": "certvit lipschitz net.safetensors --no-estimate",
            "blocks": f"python -m benchmarks.tables.jacobians net.safetensors {self.images} --limit 40",
        }
        if not self.radius:
            return {"attack": f"{self.attack} --preset cauchy", **bound}
        linf = f"{self.attack} --norm linf -e {self.radius} -a"
        l2 = f"{self.attack} --preset cauchy-l2 -e 0.5"
        return {"fgsm": f"{linf} fgsm", "linf": f"{linf} pgd-7", "l2": l2, **bound}

    @property
    def attack(self) -> str:
        return f"certvit attack net.safetensors {self.images} --split test --limit {self.limit} --no-checks"


SMALL = (
    Small(
        "digits", "digits ViT (ours)", "certvit_vit_digits", "--dataset digits", "--lr 2e-3 --batch-size 64", 396, 30,
        (0, 1, 2, 3, 4), True, "24/255",
    ),
    Small(
        "cifar10", "small CIFAR-10 ViT (ours)", f"certvit_vit_cifar10 {_MLP}", _CIFAR,
        "--lr 1e-3 --batch-size 128 --limit 10000 --validation-limit 500", 1000, 8, (0, 1, 2), False,
    ),
)  # fmt: skip
