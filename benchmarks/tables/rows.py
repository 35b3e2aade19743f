"""All tables and rows, in the order of the page."""

from benchmarks.tables import (
    cauchy,
    convolutional,
    decoded,
    local,
    operations,
    pretrained,
    specformer,
)

DATA = ("mnist", "cifar10", "cifar100", "tinyimagenet", "imagenette", "weights")
"""Names of --data, folders: mnist holds MNIST/raw, weights one folder a timm model, the others class folders."""

TABLES = (
    *(convolutional.TABLE, convolutional.PICTURE),
    *(
        table
        for paper in (operations, pretrained, specformer, cauchy, local)
        for table in paper.TABLES
    ),
)
ROWS = tuple(
    row
    for paper in (convolutional, decoded, operations, pretrained, specformer, cauchy, local)
    for row in paper.rows()
)
BY_NAME = {row.name: row for row in ROWS}
