"""Datasets: named, or a folder of class folders, as fixed-order batches of pixel images in [0, 1] with their indices."""

