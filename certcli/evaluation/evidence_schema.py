"""The structure of evidence: a closed one for each command; what it lacks is not read."""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from certcli.checkpoint.schema import (
    Count,
    Dataset,
    Digest,
    Json,
    Log10,
    Measured,
    NoArgs,
    Number,
    Seed,
    Share,
    Text,
    Upper,
    convert_json,
)
from certcli.evaluation.record_lines import Draws, JudgedImages, Length, PatchKey, PatchOptions
from certcli.evaluation.threat import MOST_IMAGES, Kind, Norm, Patch, Threat
from certcli.system.errors import Refused

MOST_RADII = 256
_TOKEN = Meta(
    pattern=r"\A[a-z0-9][A-Za-z0-9_.:=,#+\-]*(, [a-z0-9][A-Za-z0-9_.:=,#+\-]*)*\Z", max_length=256
)

ImageCount = Annotated[int, Meta(ge=1, le=MOST_IMAGES)]
Tried = Annotated[int, Meta(ge=0, le=MOST_IMAGES)]
UpperText = Annotated[str, Meta(pattern=r"\A([0-9.]{1,12}(e[+\-]?[0-9]{1,10})?|inf)\Z")]
Curve = Annotated[dict[str, Share], Meta(min_length=1, max_length=MOST_RADII)]
Attacks = Annotated[str, _TOKEN]
Arithmetic = Literal["real", "float64", "float32", "tf32", "bf16", "fp16"]
Setting = Seed | Number | bool | Attacks | None


class _Closed(Struct, forbid_unknown_fields=True):
    pass


class LipschitzParameters(_Closed):
    images: Tried = 0


class LipschitzResult(_Closed):
    """upper_text, upper_finite: of reports, which say it in words too."""

    upper: Upper
    log10_upper: Log10 | None
    lower: Measured | None = None
    why: Annotated[str, Meta(max_length=65_536)] = ""
    attention_weight: Measured | None = None
    bound_of: Literal["logits", "features"] = "logits"
    upper_text: UpperText | UnsetType = UNSET
    upper_finite: bool | UnsetType = UNSET


class FinetuneParameters(_Closed):
    epsilon: Length
    split: Literal["val"] = "val"
    images: ImageCount | None = None


class FinetuneResult(_Closed):
    """dataset: unset in files of older versions, whose share is of real arithmetic."""

    clean: Share
    certified: Share
    upper: Upper
    log10_upper: Log10 | None
    upper_text: UpperText
    upper_finite: bool
    dataset: JudgedImages | UnsetType = UNSET
    arithmetic: Arithmetic = "real"


class CertifyParameters(_Closed):
    dataset: Dataset
    split: Text
    limit: ImageCount | None
    seed: Seed
    method: Text


class LocalOptions(_Closed):
    effort: Literal["norms", "tokens", "zonotope", "backward", "branch", "auto"]
    norm: Norm
    symbols: Annotated[int, Meta(ge=0, le=10**6)]
    steps: Annotated[int, Meta(ge=0, le=64)]
    at: Annotated[list[Length], Meta(max_length=MOST_RADII)] | UnsetType = UNSET
    seconds: Annotated[float, Meta(gt=0, le=1e9)] | UnsetType = UNSET


class SmoothingOptions(_Closed):
    sigma: Annotated[float, Meta(gt=0, le=1e6)]
    n0: Draws
    samples: Draws
    alpha: Annotated[float, Meta(gt=0, lt=1)]
    enough: Length | None
    seed: Annotated[int, Meta(ge=0)]
    precision: Literal["float32", "bf16"]
    noise: Text
    decide: bool | UnsetType = UNSET
    denoiser: Digest | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.seed >= 1 << 64:
            raise ValueError("its seed is not below 2^64")


OPTIONS: Mapping[str, type[Struct]] = {
    "lipschitz": NoArgs,
    "box": NoArgs,
    "local": LocalOptions,
    "local-lip": NoArgs,
    "bcp": NoArgs,
    "smoothing": SmoothingOptions,
    "patch": PatchOptions,
}
"""Parameters of each certificate method, in evidence and in the header of records; a test keeps it
equal to the registry.
"""


class CertifyResult(_Closed):
    """average_radius: of all methods but `patch`."""

    dataset: JudgedImages
    clean: Share
    certified: Curve
    images: ImageCount
    method: Text
    failure: Annotated[float, Meta(ge=0, lt=1)]
    promise: Text
    arithmetic: Arithmetic
    parameters: Json
    average_radius: Length | UnsetType = UNSET

    @property
    def options(self) -> Struct:
        if self.method not in OPTIONS:
            raise Refused("no method of certify")
        return convert_json(self.parameters, OPTIONS[self.method])

    @property
    def norm(self) -> Kind:
        """Of what it is certified against."""
        options = self.options
        return (
            options.norm
            if isinstance(options, LocalOptions)
            else "patch"
            if self.method == "patch"
            else "l2"
        )

    @property
    def shares(self) -> list[tuple[Threat, float]]:
        """Ascending threats with certified shares; Refused for a key that is no threat."""
        return sorted(
            (Threat.from_key(key, self.norm), share) for key, share in self.certified.items()
        )


class AttackParameters(_Closed):
    dataset: Dataset = ""
    split: Text = ""
    images: ImageCount | None = None
    attacks: list[list[Attacks]] = []
    radii: list[list[Length]] = []
    norm: list[Kind] = []
    patches: list[PatchKey] = []
    defence: PatchOptions | UnsetType = UNSET
    independent: list[bool] = []
    settings: Annotated[dict[Attacks, Setting], Meta(max_length=64)] = {}
    preset: Attacks | None = None
    source: Digest | None = None
    certified_only: bool = False
    refine: Annotated[int, Meta(ge=0, le=10**6)] = 0


class AttackPart(_Closed):
    """One stage at one radius, or at one size of patch."""

    norm: Kind
    images: ImageCount
    clean: Share
    robust: Share
    attacks: Annotated[dict[Attacks, Share], Meta(max_length=MOST_RADII)]
    median_norm: Length | None
    intervals: Annotated[dict[Attacks, tuple[Share, Share]], Meta(max_length=MOST_RADII)] = {}
    independent: bool = False
    fooled: Count | UnsetType = UNSET
    fooled_8bit: Count | UnsetType = UNSET
    own_radii: dict[Literal["smallest", "median", "largest"], Length] | UnsetType = UNSET
    epsilon: Length | UnsetType = UNSET
    patch: PatchKey | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.norm == "patch", self.norm == "patch") != (
            self.epsilon is UNSET,
            self.patch is not UNSET,
        ):
            raise ValueError("a radius is stated of balls, and a patch of patches")

    @property
    def threat(self) -> Threat:
        return (
            Threat("patch", Patch.from_key(self.patch))
            if self.patch
            else Threat(self.norm, self.epsilon or 0.0)
        )


class AttackFlag(_Closed):
    """A check that was raised; its words are not shown."""

    name: Text
    measured: Text
    raised_if: Annotated[str, Meta(max_length=4096)]
    explanation: Annotated[str, Meta(max_length=4096)]
    fatal: bool


class AttackResult(AttackPart):
    """The first part, and what the others have in common."""

    dataset: JudgedImages | UnsetType = UNSET
    curve: Annotated[dict[str, Share], Meta(max_length=MOST_RADII)] = {}
    parts: Annotated[list[AttackPart], Meta(max_length=MOST_RADII)] = []
    flags: Annotated[list[AttackFlag], Meta(max_length=64)] = []
    checks: Annotated[list[Text], Meta(max_length=64)] = []
    preset: Attacks | None = None
    source: Digest | None = None
    certified_only: bool = False
    refine: Annotated[int, Meta(ge=0, le=10**6)] = 0


class KeptParameters(_Closed):
    calibration: Dataset


class Rung(_Closed):
    """One row of adapt's trade."""

    changes: Tried
    floors: Tried
    attentions: Tried
    log10_upper: Log10 | None
    agreement: Share
    error: Measured
    accuracy: Share | None
    taken: bool
    agreement_at_least: Share | UnsetType = UNSET


class KeptResult(_Closed):
    """What adapt or constrain kept of the network that it changed."""

    images: ImageCount
    logits_error: Measured
    agreement: Share
    agreement_interval: tuple[Share, Share]
    accuracy_before: Share | None
    accuracy_before_interval: tuple[Share, Share] | None
    accuracy_after: Share | None
    accuracy_after_interval: tuple[Share, Share] | None
    dataset: Dataset
    split: Text
    took_part: bool
    trained_on: bool
    chose: bool | UnsetType = UNSET
    logits_error_at_most: Measured | UnsetType = UNSET
    agreement_at_least: Share | UnsetType = UNSET
    trade: Annotated[list[Rung], Meta(max_length=10_000)] | UnsetType = UNSET


COMMANDS: Mapping[str, tuple[type[Struct], type[Struct]]] = {
    "lipschitz": (LipschitzParameters, LipschitzResult),
    "finetune": (FinetuneParameters, FinetuneResult),
    "certify": (CertifyParameters, CertifyResult),
    "attack": (AttackParameters, AttackResult),
    "adapt": (KeptParameters, KeptResult),
    "constrain": (KeptParameters, KeptResult),
}
"""Who writes evidence: the types of its parameters and of its result."""

UNVERIFIED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "lipschitz": ("parameters", "result.lower", "result.attention_weight", "result.why"),
    "finetune": (),
    "certify": ("parameters.limit", "parameters.seed"),
    "attack": ("parameters", "result"),
    "adapt": ("parameters", "result"),
    "constrain": ("parameters", "result"),
}
"""Fields that `certvit verify` does not recompute: measured ones, and the choice of the images."""
