"""Every attack by name: where it lives, what it does, where it comes from."""

from certcli.system.registry import Entry, Registry

ATTACKS = Registry(
    "attack",
    Entry(
        "fgsm",
        "certcli.attack.families.gradient:fgsm",
        "one step of the radius along the gradient (its sign for linf, its direction for l2)",
        "Goodfellow et al. 2015, Explaining and harnessing adversarial examples",
    ),
    Entry(
        "pgd",
        "certcli.attack.families.gradient:pgd",
        "projected gradient ascent of the cross entropy from a random start",
        "Madry et al. 2018, Towards deep learning models resistant to adversarial attacks",
    ),
    Entry(
        "eot-pgd",
        "certcli.attack.families.gradient:eot_pgd",
        "PGD on the gradient averaged over several draws, for networks that are random",
        "Athalye et al. 2018, Synthesizing robust adversarial examples; Zimmermann 2019, arXiv:1907.00895",
    ),
    Entry(
        "margin-pgd",
        "certcli.attack.families.margin:margin_pgd",
        "projected gradient ascent of max_j z_j - z_y, the quantity that a margin certificate bounds",
        "Carlini & Wagner 2017 (the loss), Madry et al. 2018 (the ascent)",
    ),
    Entry(
        "saga",
        "certcli.attack.families.saga:saga",
        "PGD whose gradient is weighted by the attention rollout of the image; vision transformers only",
        "Mahmood et al. 2021, On the robustness of vision transformers to adversarial examples",
    ),
    Entry(
        "cw",
        "certcli.attack.families.carlini:carlini_wagner",
        "smallest l2 perturbation by Adam on distance and margin, with the binary search over c, image by image",
        "Carlini & Wagner 2017, Towards evaluating the robustness of neural networks",
    ),
    Entry(
        "deepfool",
        "certcli.attack.families.deepfool:deepfool",
        "smallest l2 perturbation by repeated linearisation towards the nearest of the ten likeliest classes",
        "Moosavi-Dezfooli et al. 2016, DeepFool",
    ),
    Entry(
        "fab",
        "certcli.attack.families.fab:fab",
        "smallest perturbation by projections onto linearised class boundaries, one run a target class",
        "Croce & Hein 2020, Minimally distorted adversarial examples with a fast adaptive boundary attack",
    ),
    Entry(
        "apgd-ce",
        "certcli.attack.families.apgd:apgd_ce",
        "PGD of the cross entropy that halves its own step size",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Entry(
        "apgd-dlr",
        "certcli.attack.families.apgd:apgd_dlr",
        "APGD of the scale-free difference of logits ratio (of the margin, below 3 classes)",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Entry(
        "apgd-t",
        "certcli.attack.families.apgd:apgd_targeted",
        "APGD of the targeted difference of logits ratio, one run a target class (of the margin, below 4 classes)",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Entry(
        "square",
        "certcli.attack.families.square:square",
        "random search over squares; needs no gradient, so it sees through masked ones",
        "Andriushchenko et al. 2020, Square attack",
    ),
    Entry(
        "autoattack",
        "certcli.attack.families.auto:autoattack",
        "APGD-CE, APGD-T, FAB-T, Square in turn; runs that are far from a success at their checkpoints are left",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
    Entry(
        "autoattack-full",
        "certcli.attack.families.auto:autoattack_full",
        "the same with the whole of the published budgets for every image that withstands",
        "Croce & Hein 2020, Reliable evaluation of adversarial robustness",
    ),
)

DETERMINISTIC = frozenset({"fgsm", "cw", "deepfool"})
"""Attacks that draw nothing at random: a restart would repeat the same work, so it is not made."""

L2_ONLY = frozenset({"cw", "deepfool"})
"""Attacks that minimise the l2 norm; their results mean nothing for linf, so they are refused there."""

NEEDS_ATTENTION = frozenset({"saga"})
"""Attacks that look at the attention maps of a vision transformer, and refuse other networks."""
