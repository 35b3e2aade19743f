"""What the papers say that no pair of our rows can judge: contributions, sentences, columns, and
baselines of others.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A sentence of a paper, judged by a proof, by the paper's own figures or by a page of ours.

    sentence: a line of excerpts.txt. contribution: its number in the paper's list, 0: of no list.
        verdict: one of VERDICTS.
    why: what decides it, in Markdown.
    """

    seed: str
    contribution: int
    sentence: str
    verdict: str
    why: str


VERDICTS = ("holds", "false", "contradicts itself", "in part", "not here")

CONTRIBUTIONS = {"certvit": 5, "specformer": 3, "cauchy": 4}
"""How many each paper lists."""

FINDINGS = (
    Finding(
        "certvit",
        1,
        "We present a method to constrain the Lipschitz bounds of pre-trained transformers",
        "in part",
        "`certvit constrain` lowers the bounds and keeps the outputs; by itself it certifies nothing "
        "(`certvit-1/mnist/4c3f/constrained`)",
    ),
    Finding(
        "certvit",
        2,
        "effectiveness of our proposed method CertViT in certifying standard convolution",
        "in part",
        "the claims on certified accuracy above",
    ),
    Finding(
        "certvit",
        3,
        "we adopt a Lipschitz continuous",
        "false",
        "the layer of the authors' code leaves out the factor A_h and is not Lipschitz "
        "([why](soundness.md#l2-attention-without-the-factor-a_h)); with A_h it is built here",
    ),
    Finding(
        "certvit",
        4,
        "the computational cost aspects of training a robust transformer from scratch",
        "contradicts itself",
        "decoded, its FLOPs make other epochs than its Tables 7 to 10 print (`certvit-1f/*`, `certvit-10/*`)",
    ),
    Finding(
        "certvit",
        5,
        "We report results on several varieties of ImageNet",
        "not here",
        "needs ImageNet-1k and GPUs; ViT-Tiny alone ran (`certvit-3/vit-t16/*`)",
    ),
    Finding(
        "certvit",
        0,
        "better PGD and certified accuracy than existing works for all the datasets",
        "contradicts itself",
        "its TinyImageNet row certifies 26.3 where Local-Lip's certifies 27.4, and its 6C2F row withstands PGD in 63.2 "
        "where GloRo's does in 63.8",
    ),
    Finding(
        "certvit",
        0,
        "CertViT also takes less computational time than other methods",
        "contradicts itself",
        "the ViT rows cost more than standard training (358.0 against 331.5), and the caption says that BCP takes less on "
        "6C2F",
    ),
    Finding(
        "certvit",
        0,
        "CertViT also maintained accuracy close to the pre-trained network",
        "contradicts itself",
        "8C2F falls from 62.3 to 42.4 on CIFAR-100",
    ),
    Finding(
        "certvit",
        0,
        "hyper-parameters mentioned in the respective works",
        "false",
        "Local-Lip's published script for CIFAR-10 stands in Table 8's column of CIFAR-100 "
        "([more](finetune.md#the-papers-trainings))",
    ),
    Finding(
        "certvit",
        0,
        "For all experiments of CertViT, we use",
        "contradicts itself",
        "section 4.1 sets eta to 0.1 and beta to 0.01, Tables 9 and 10 set eta to 1e-2 and beta to 0.1 and more",
    ),
    Finding(
        "certvit",
        0,
        "reduced Lipscthiz, leading to increased PGD accuracy",
        "not here",
        "needs ImageNet-1k; it compares with the L2 networks, at 3.8 to 5.9 points less clean accuracy",
    ),
    Finding(
        "certvit",
        0,
        "Algorithm 1: CertViT: Constraining a Layer",
        "false",
        "with the sign as printed it diverges ([why](soundness.md#certvit-algorithms-1-and-2)); with the other it converges",
    ),
    Finding(
        "certvit",
        0,
        "Algorithm 2: Mini-batch algorithm for computing",
        "false",
        "its first step divides 0 by 0 ([why](soundness.md#certvit-algorithms-1-and-2)); built with Combettes' signs",
    ),
    Finding(
        "cauchy",
        0,
        "is shown in Equation (5) (see detail in Appendix)",
        "false",
        "one of its products stands in the wrong order ([why](soundness.md#cauchy-paper-equation-5))",
    ),
    Finding(
        "certvit",
        0,
        "attacking an ensemble of transformers and",
        "not here",
        "`--attack saga` attacks one vision transformer. Against an ensemble it adds the gradients of separate networks; "
        "here an ensemble is one network, the mean of its members (`certvit init --member`), and every other attack takes "
        "its whole gradient",
    ),
    Finding(
        "specformer",
        1,
        "a comprehensive theoretical analysis of the local Lipschitz continuity",
        "false",
        "its Theorem 4.3 fails at the origin ([why](soundness.md#specformer-theorem-43))",
    ),
    Finding(
        "specformer",
        2,
        "a robust Transformer architecture that applies Maximum Spectral Value Penalization",
        "in part",
        "built as `finetune --msvp`; what it does: the claims above",
    ),
    Finding(
        "specformer",
        3,
        "the superiority of our approach in both clean and robust accuracy",
        "in part",
        "the claims above: above the replaced attentions, not above the plain ViT",
    ),
    Finding(
        "specformer",
        0,
        "SpecFormer achieves the best results among all the competitors",
        "contradicts itself",
        "ViT-S, adversarial training on CIFAR-10: 31.90 after PGD-20, L2Former 35.78",
    ),
    Finding(
        "specformer",
        0,
        "exhibits the lowest additional computational costs compared to other baseline models",
        "not here",
        "of their code on a GPU; by ours on a CPU L2 attention costs less than the penalty (`specformer-3/*`)",
    ),
    Finding(
        "specformer",
        0,
        "effectively limits the maximum singular values across all layers",
        "not here",
        "Figure 2a, of their networks",
    ),
    Finding(
        "specformer",
        0,
        "Algorithm 1 SpecFormer",
        "false",
        "as printed it never normalises u and v: each step multiplies them by the singular values, and what is called sigma "
        "grows or vanishes. `--msvp` normalises them",
    ),
    Finding(
        "specformer",
        0,
        "adeptly realigns the corrupted samples with their original true classes",
        "not here",
        "Figures 2b and 2c, t-SNE of their networks: not drawn, a picture whose distances mean nothing across clusters",
    ),
    Finding(
        "specformer",
        0,
        "which quantifies the similarity between two distributions",
        "not here",
        "the distance of Figures 2b and 2c is printed for networks that are not published; not computed for ours",
    ),
    Finding(
        "cauchy",
        0,
        "Error Bound for Forward Euler approximation",
        "not here",
        "a bound between a network and an equation that nobody runs; no certificate follows from it",
    ),
    Finding(
        "cauchy",
        0,
        "is actually bounded by the right-hand-side of Equation (15)",
        "in part",
        "to first order, as the paper says: an estimate of the growth of a perturbation, and no order of two networks "
        "follows from it ([why](soundness.md#cauchy-paper-theorem-2))",
    ),
    Finding(
        "cauchy",
        1,
        "the first work to formally bridge the gap",
        "false",
        "its Theorem 2 is false as printed ([why](soundness.md#cauchy-paper-theorem-2))",
    ),
    Finding(
        "cauchy",
        2,
        "We theoretically prove that ViTs are Lipschitz continuous on vision tasks",
        "holds",
        "on a bounded set of images; our bounds are such constants ([5.1](bounds.md#51-one-input))",
    ),
    Finding(
        "cauchy",
        3,
        "the first and last layers in the encoder of ViTs are the most critical factors",
        "in part",
        "of ViT-Tiny the first block has 39.4, the last 4.3, the least of all, and block 7 has 39.0 (four synthetic "
        "photographs, `benchmarks/tables/jacobians.py`); the paper's networks were not trained",
    ),
    Finding(
        "cauchy",
        4,
        "MSA can only improve the robustness of ViTs under weak attacks, e.g., FGSM attack",
        "in part",
        "the claims above. At the same seven steps of PGD the order depends on the norm (linf or l2), so strength and norm "
        "are confounded: the paper's strong attacks are all l2",
    ),
    Finding(
        "cauchy",
        0,
        "it even compromises the robustness of ViTs under strong attacks, e.g., PGD attack",
        "contradicts itself",
        "section 5.3 counts PGD-7 among the weak attacks, under which its Table 2 has ViT above CoViT",
    ),
    Finding(
        "cauchy",
        0,
        "the most robust model has the lowest average maximum singular value",
        "contradicts itself",
        "of Table 1 CoViT-T4 is the most robust (51.5 after PGD-20) and CoViT-T3 has the lowest (6.413)",
    ),
    Finding(
        "cauchy",
        0,
        "depth will enhance both generalization power and robustness",
        "not here",
        "one depth was run",
    ),
    Finding(
        "cauchy",
        0,
        "a larger patch size always induces better adversarial robustness",
        "not here",
        "one patch size was run",
    ),
    Finding(
        "cauchy",
        0,
        "it is replaced by 1-D convolution layers where different kernel are used",
        "in part",
        "parallel kernels of one size joined by a linear map are one kernel: its K3 and 4 x K3 are the same functions "
        "(`certvit_covit_t1`, `certvit_covit_t2`)",
    ),
    Finding(
        "cauchy",
        0,
        "classifier f is more robust than g",
        "false",
        "two states and one block suffice ([why](soundness.md#cauchy-paper-theorem-2))",
    ),
)

_GPU = "not here: needs the paper's training on GPUs"
_DATA = "not here: needs the data and ImageNet weights"
_SETTING = "not here: a setting, no result"
COLUMNS = {
    ("certvit", 1): {
        "Params": "certvit-1/parameters",
        "Clean": "certvit-1/clean",
        "PGD": "certvit-1/attacked",
        "Cert.": "certvit-1/certified",
        "Lip.": "certvit-1/upper",
        "FLOPs": "certvit-1f/epochs",
    },
    ("certvit", 2): {
        "DP Params": "certvit-2/parameters",
        "L2 Params": "certvit-2/tied",
        "L2 FLOPs": "certvit-2/adapt",
        "CertViT FLOPs": "certvit-10/ratio",
    },
    ("certvit", 3): {
        "Clean": "certvit-3/clean",
        "PGD": "certvit-3/attacked",
        "Cert.": "certvit-3/certified",
        "Lip.": "certvit-3/formula",
    },
    **{("certvit", number): {"all": _SETTING} for number in range(4, 7)},
    ("certvit", 7): {"all": f"{_SETTING}; `certvit finetune --preset gloro-mnist` and three more"},
    ("certvit", 8): {
        "all": f"{_SETTING}; `certvit finetune --preset local-lip-mnist` and three more"
    },
    ("certvit", 9): {
        "all": f"{_SETTING}; `certvit finetune --preset certvit-mnist` and three more"
    },
    ("certvit", 10): {"all": "certvit-10/epochs"},
    ("specformer", 1): {
        "CIFAR-10 Standard": "specformer-1/clean",
        "CIFAR-10 FGSM": "specformer-1/fgsm",
        "CIFAR-10 PGD-2": "specformer-1/pgd2",
        "CIFAR-100": _DATA,
        "Imagenette": _GPU,
    },
    ("specformer", 2): {
        "CIFAR-10 Standard": "specformer-2/clean",
        "CIFAR-10 CW-20": "specformer-2/cw20",
        "CIFAR-10 PGD-20": "specformer-2/pgd20",
        "CIFAR-100": _DATA,
        "Imagenette": _GPU,
    },
    ("specformer", 3): {
        "Std. training": "specformer-3/standard",
        "Adv. training": "specformer-3/adversarial",
    },
    ("specformer", 4): {"all": "not here: a comparison in words"},
    ("specformer", 5): {
        "Standard": "specformer-5/clean",
        "PGD-2": "specformer-5/pgd2",
        "FGSM": "specformer-5/fgsm",
        "Adversarial training": _GPU,
    },
    ("specformer", 6): {"all": "not here: needs ImageNet and ImageNet-22k weights"},
    ("cauchy", 1): {
        "Clean": "cauchy-1/clean",
        "PGD-20 (l2)": "cauchy-1/pgd20",
        "CW (l2)": "cauchy-1/cw",
        "sigma_max": "cauchy-1/sigma",
    },
    ("cauchy", 2): {
        "Clean": "cauchy-2/clean",
        "FGSM": "cauchy-2/fgsm",
        "PGD-7 (linf)": "cauchy-2/pgd7",
        "PGD-7 (l2)": "cauchy-2/pgd7l2",
        "CW (l2)": "cauchy-2/cw",
        "(norm 1 x norm inf)^1/2": "cauchy-2/hoelder",
    },
}
"""Paper and number of a table -> its columns -> our table and column, or why there is none."""

BASELINES = (
    (
        "certvit-1/mnist/4c3f/gloro",
        62.8,
        "[Leino et al. 2021](https://arxiv.org/abs/2102.08452)",
    ),
    (
        "certvit-1/mnist/4c3f/bcp",
        47.95,
        "Lee, Lee & Park, NeurIPS 2020 ([code](https://github.com/sungyoon-lee/bcp))",
    ),
)
"""Row of CertViT's Table 1, the certified accuracy that the method's authors publish (%), and where."""
