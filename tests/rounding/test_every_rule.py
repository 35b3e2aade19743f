"""The rounding of all operations that have a theorem: no execution differs by more than is proven,
or there is no proof.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.checkpoint.record import InputSpec
from certcli.engine.table import NoRule
from certcli.models.pixels import PixelModel
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.rounding.arithmetics import ALGORITHMS, covered
from certcli.rounding.operation_errors import rules
from tests.helpers.executions import require_within
from tests.helpers.grids import EVERY
from tests.helpers.lipschitz_cases import ROWS, build_row, f
from tests.helpers.reached import Entry, entries_without_row, recorded
from tests.helpers.slopes import IMAGE
from tests.rounding.coverage import documents
from tests.rounding.operations_alone import operations

WITHOUT_ROUNDING = {
    "upsample", "resize", "spelled-single", "spelled-single-images", "spelled-precisions", "spelled-images",
}  # fmt: skip
OTHER_BATCHES = (
    "cat-twice", "roll-flat", "unfold", "split-heads", "matrix-transpose", "spelled-rounded-views", "spelled-rounded-sums",
    "spelled-rounded-moves", "spelled-rounded-enclosed", "spelled-rounded-chosen", "spelled-sums",
    "fold", "conv-3d-patches", "spelled-at-rest",
    "variances", "deviations", "side-by-side", "spelled-lines", "spelled-jumps",
)  # fmt: skip
"""Their forward passes are of one image."""
QUICK = [
    "clipped-relu", "log-softmax", "einsum", "add-products", "mix-matrices", "soft-pairs-partly", "sort-partly",
    "silu", "mish", "hard-swish", "quick-gelu", "sigmoid", "hard-mish", "rms-norm", "group-norm", "l2-normalize",
    "response-norm", "softmax", "roll-pad-flip", "constant-matrices", "constant-matrix", "gate", "swiglu", "product",
    "square", "adaptive", "clamp", "attention-windows", "attention-masked", "attention-causal", "attention-channels",
    "attention-talking", "attention-l2-windows", "attention-cosine", "global-pool", "squeeze-excite", "expand",
    "conv-3-stride", "rms-norm-torch", "group-norm-1", "center-norm", "floor-norm", "layer-scale", "maxmin",
    "augmented", "unfold", "shuffle", "attention", "rolled", "l2-pool", "adaptive-1d", "convex", "weighted",
    "spelled-rounded-curves", "spelled-rounded-hard", "spelled-rounded-jumps", "spelled-rounded-views",
    "spelled-rounded-parts", "spelled-rounded-moves", "spelled-rounded-chosen", "spelled-rounded-sums",
    "spelled-rounded-at-rest", "spelled-rounded-images", "spelled-batch-norm-of-rows", "conv-transposed", "conv1d",
    "rms-norm-2d", "avg-pool-1d", "simple-norm", "simple-norm-2d", "curves", "softplus", "leaky", "avg-pool", "norm",
    "conv-reflect", "masked", "attention-moving-mask", "attention-positional", "attention-l2-gated",
    "attention-l2-untied", "token-convolution", "choice", "larger", "deviations", "variances", "fold", "conv-3d",
    "adaptive-max", "adaptive-3d", "spelled-curves", "spelled-jumps", "spelled-lines", "spelled-at-rest",
    "spelled-sums", "rms-norm-act-2d", "attention-torch", "attention-lipschitz-norm", "choice-of-scores",
    "add-product", "lerp", "steep",
]  # fmt: skip
"""They reach every entry of the table; the other rows are other sizes and compositions of the same."""


def network(name: str, offset: float = 0.0, scale: float = 1.0) -> PixelModel:
    """Return a row's network on pixels; offset: added to its vectors, biases among them, which then
    cancel. scale: of its parameters, which storing them may move far.
    """
    net = build_row(name)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
            if offset and parameter.dim() == 1:
                parameter.add_(offset * (1 + 0.1 * torch.rand_like(parameter)))
    flat = (
        net if net(torch.rand(1, *IMAGE).double()).dim() == 2 else nn.Sequential(net, nn.Flatten())
    )
    return PixelModel(InputSpec(size=IMAGE, mean=(0.4,) * 2, std=(0.3,) * 2), flat).double().eval()


REACHED: set[Entry] = set()
"""Entries of the table that the rows of `analysed` have reached."""


@functools.cache
def analysed(name: str, arithmetic: str) -> NeighbourErrors:
    with recorded(rules) as reached:
        analysis = NeighbourErrors(network(name), IMAGE, PRECISIONS[arithmetic])
    REACHED.update(reached)
    return analysis


STEEP = ("attention-windows-cosine", "slices", "steep")
"""Rows that divide fibres of zeros by their eps: the slope is 1e12 there; the last has slopes near an image only."""


@pytest.mark.parametrize("arithmetic", PRECISIONS if EVERY else ["float32"])
@pytest.mark.parametrize(
    "name", [name for name in ROWS if name not in WITHOUT_ROUNDING] if EVERY else QUICK
)
@pytest.mark.parametrize("offset", [0.0, 3e3] if EVERY else [0.0])
def test_no_execution_of_a_rule_differs_by_more_than_is_proven(
    name: str, arithmetic: str, offset: float
) -> None:
    """In every memory format, choice of kernels and order of sums; under `make soundness` in
    batches of up to 65, and of large biases.
    """
    model = network(name, offset)
    try:
        analysis = (
            NeighbourErrors(model, IMAGE, PRECISIONS[arithmetic])
            if offset
            else analysed(name, arithmetic)
        )
    except NoRule:
        if arithmetic in ("float64", "float32") and not offset:
            raise
        return  # an eps that vanishes, sizes that overflow
    noise = torch.rand(
        63 if EVERY else 3, *IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    pixels = torch.cat([noise, noise[:1].round(), torch.zeros_like(noise[:1])])
    parts = pixels.split(1) if name in OTHER_BATCHES else [pixels]
    bound = max(require_within(analysis, model, part, 0.5, arithmetic) for part in parts)
    if arithmetic in ("float64", "float32") and not offset and name not in STEEP:
        assert bound < 2.0**34 * PRECISIONS[arithmetic].unit  # it says something


SMALL = (
    "conv-3-stride", "attention", "swiglu", "layer-scale", "constant-matrices", "mix-matrices", "group-norm",
    "attention-l2-windows", "spelled-rounded-images", "spelled-rounded-parts", "center-norm", "rms-norm-torch",
    "response-norm",
)  # fmt: skip
"""Rows whose numbers, small ones of fp16, are stored far from where they are."""
LEAST = {"float32": 2.0**-11, "fp16": 2.0**-6}
"""Of what is proven, what some execution of each theorem loses. Functions of float32 lose 2^-24 where 2^-18 is charged."""


@pytest.mark.parametrize("arithmetic", PRECISIONS if EVERY else LEAST)
def test_no_operation_alone_loses_more_and_of_each_theorem_some_lose_nearly_as_much(
    arithmetic: str,
) -> None:
    """At scales where one or the other term is the largest: a theorem that is a hundred times too
    small would show. The rows reach every entry of the table.
    """
    largest: dict[str, float] = defaultdict(float)
    for name in QUICK:
        try:
            analysis = analysed(name, arithmetic)
        except NoRule:
            assert arithmetic != "float32"
            continue
        for alone in operations(analysis, IMAGE, PRECISIONS[arithmetic]):
            assert alone.error <= alone.bound, (name, alone)
            if 0 < alone.bound < math.inf:
                largest[alone.rule] = max(largest[alone.rule], alone.error / alone.bound)
    # a forward that asks for float64 is another network in float32, and is refused there
    widened = f(lambda m, x: (m.w @ x.double().flatten(1).T).T, w=torch.randn(3, 32))
    spec = InputSpec(size=IMAGE, mean=(0.4,) * 2, std=(0.3,) * 2)
    wide = PixelModel(spec, widened).double().eval()
    with recorded(rules) as reached:
        NeighbourErrors(wide, IMAGE, PRECISIONS["float64"])
    if arithmetic in LEAST:
        assert [rule for rule, share in largest.items() if share < LEAST[arithmetic]] == []
    if arithmetic == "float32":
        assert entries_without_row(rules, REACHED | reached) == []


@pytest.mark.parametrize("exactly", [False, True], ids=["moved", "exact"])
@pytest.mark.parametrize("name", SMALL)
def test_no_operation_alone_loses_more_of_the_smallest_numbers(name: str, exactly: bool) -> None:
    """Stored far from where they are, or numbers of fp16 whose products underflow."""
    model = network(name, scale=2.0 ** (-22 if exactly else -20))
    if exactly:
        model = model.half().double()
    analysis = NeighbourErrors(model, IMAGE, PRECISIONS["fp16"])
    for alone in operations(analysis, IMAGE, PRECISIONS["fp16"]):
        assert alone.error <= alone.bound, alone


def test_every_other_row_is_proven_or_refused_by_name() -> None:
    refused = {}
    for name in {*ROWS}.difference(QUICK):
        try:
            NeighbourErrors(network(name), IMAGE, PRECISIONS["float64"])
        except NoRule as reason:
            refused[name] = str(reason)
    named = re.compile("rounding|its theorem does not know")
    assert [name for name, why in refused.items() if not named.search(why)] == []
    assert {*refused} == WITHOUT_ROUNDING


def shifted(
    constant: Callable[[Tensor], Tensor], joined: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> PixelModel:
    """The image, and a constant of the weights (4, 4)."""
    torch.manual_seed(2)
    net = f(lambda m, x: joined(x, constant(m.w)).flatten(1), w=torch.randn(4, 4))
    return PixelModel(InputSpec(size=IMAGE, mean=(0.4,) * 2, std=(0.3,) * 2), net).double().eval()


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "a part": lambda w: w[1:2],
    "by number": lambda w: w[torch.tensor([3, 1, 1, 0])].permute(1, 0).contiguous(),
    "numbers that are counted": lambda w: w[torch.arange(3, -1, -1)],
    "beside zeros": lambda w: torch.cat([w[:2], torch.zeros_like(w[:1]), w.new_ones(1, 4)]).roll(1),
}
COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "sums": lambda w: (w + w.T) - 0.1 * w,
    "sums that cancel": lambda w: (w + 1000.0) - 1000.0,
    "a product": lambda w: w @ w.T,
    "a network of positions": lambda w: (
        16 * torch.sigmoid(functional.linear((w @ w.T).relu(), w, w[0])[:, [0, 0, 1, 2]])
    ),
    "in place": lambda w: functional.relu(w @ w, inplace=True) * w,
    "a temperature": lambda w: w[:1, :1].clamp(max=math.log(100.0)).exp(),
    "of a temperature that is stored": lambda w: (w * 3.0).exp().tanh(),
    "moved": lambda w: torch.cat([(w * w)[:2].roll(1, 0), w[2:]]),
}
REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "no rule": lambda w: w.erf(),
    "no rule, then moved": lambda w: w.erf()[torch.tensor([3, 1, 1, 0])],
    "in place": lambda w: w.clone().mul_(3),
    "a view in place": lambda w: (y := w.clone(), y[0].add_(1))[0],
    "read before it is overwritten": lambda w: (y := w + 1, y * 2, y.relu_())[1],
    "chosen by weights": lambda w: w[w[:, 0].argsort()],
    "chosen by a comparison": lambda w: w[(w[:, 0] > 0).long()],
}


@pytest.mark.parametrize("name", MOVED)
def test_weights_that_are_moved_are_stored_and_not_computed(name: str) -> None:
    model = shifted(MOVED[name])
    require_within(
        NeighbourErrors(model, IMAGE, PRECISIONS["fp16"]),
        model,
        torch.rand(2, *IMAGE).double(),
        0.5,
        "fp16",
    )


@pytest.mark.parametrize("arithmetic", PRECISIONS if EVERY else ["fp16"])
@pytest.mark.parametrize("joined", [torch.add, torch.mul], ids=["added", "a factor"])
@pytest.mark.parametrize("name", COMPUTED)
def test_no_execution_of_a_computed_constant_differs_by_more(
    name: str, joined: Callable[[Tensor, Tensor], Tensor], arithmetic: str
) -> None:
    model = shifted(COMPUTED[name], joined)
    analysis = NeighbourErrors(model, IMAGE, PRECISIONS[arithmetic])
    bound = require_within(analysis, model, torch.rand(2, *IMAGE).double(), 0.5, arithmetic)
    precision = PRECISIONS[arithmetic]
    assert bound < 2.0**22 * max(precision.unit, precision.factor)  # it says something


COMPUTES = "a constant that the network computes"
JOINED: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor], str]] = [
    *((constant, torch.add, COMPUTES) for constant in REFUSED.values()),
    # a matrix that is computed, a choice of entries by weights, sums in float32 whatever the network runs in
    *(((COMPUTED | REFUSED)[name], torch.matmul, COMPUTES) for name in ("sums", "no rule")),
    (lambda w: w[:, 0].argsort(), lambda x, places: x[:, :, places], COMPUTES),
    (lambda w: w, lambda x, w: x.mean(-1, dtype=torch.float32) + w[0, 0], "a precision of its own"),
]


@pytest.mark.parametrize(("constant", "joined", "words"), JOINED)
def test_what_is_computed_of_weights_in_other_ways_is_refused(
    constant: Callable[[Tensor], Tensor], joined: Callable[[Tensor, Tensor], Tensor], words: str
) -> None:
    with pytest.raises(NoRule, match=words):
        NeighbourErrors(shifted(constant, joined), IMAGE, PRECISIONS["float64"])


def test_sizes_at_an_image_hold_the_error_of_what_is_computed() -> None:
    """Of an image of zeros only the error has a size."""
    model = (
        PixelModel(InputSpec(size=IMAGE, mean=(0.0,) * 2, std=(0.3,) * 2), nn.Flatten())
        .double()
        .eval()
    )
    errors = NeighbourErrors(model, IMAGE, PRECISIONS["float32"])
    assert bool((errors._lengths(torch.zeros(1, *IMAGE).double())[0] >= errors._widest).all())
    assert float(errors._widest[1]) > 0


def test_sizes_near_an_image_that_overflow_are_those_of_the_box() -> None:
    """Numbers of 1e180 are finite, the sum of their squares is not."""
    model = shifted(lambda w: w, lambda x, w: (x * 1e180) * 1e-180 + w)
    analysis = NeighbourErrors(model, IMAGE, PRECISIONS["float64"])
    assert torch.equal(
        analysis(torch.rand(1, *IMAGE), torch.ones(1), torch.tensor([0]))[0], analysis.on_box[0]
    )


def test_a_constant_is_stored_wherever_it_is_repeated() -> None:
    """One number in place of all entries: each of them is off by what storing it moves."""
    model = shifted(lambda w: w[:1, :1], torch.maximum)
    model.net.w.data.fill_(9.0001)
    analysis = NeighbourErrors(model, IMAGE, PRECISIONS["fp16"])
    (largest,) = [
        alone
        for alone in operations(analysis, IMAGE, PRECISIONS["fp16"])
        if "larger" in alone.rule and alone.operands == "zeros"
    ]
    off = abs(float(torch.tensor(9.0001).half()) - 9.0001)
    assert off * 32**0.5 * (1 - 1e-9) <= largest.error <= largest.bound


def test_every_rule_states_what_it_covers() -> None:
    stated = {title: covered(rule.apply) for title, rule in rules.modules.items()}
    for table in (rules.functions, rules.methods, rules.settlers):
        stated |= {title: covered(rule) for title, rule in table.items()}
    assert [title for title, names in stated.items() if not names] == []
    assert {name for names in stated.values() for name in names} == {*ALGORITHMS}


def test_the_page_is_that_of_the_registry() -> None:
    written = {path: path.read_text() for path in documents()}
    assert written == documents(), "python -m tests.rounding.coverage"
