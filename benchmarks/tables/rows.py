"""All tables and rows, in the order of the page."""

from benchmarks.tables import convolutional, transformers

DATA = ("mnist", "cifar10", "cifar100", "tinyimagenet", "imagenette", "weights")
"""Names of --data, folders: mnist holds MNIST/raw, weights one folder a timm model, the others class folders."""

TABLES = (convolutional.TABLE, convolutional.PICTURE, *transformers.TABLES)
ROWS = (*convolutional.rows(), *transformers.rows())
