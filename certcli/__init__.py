"""certvit: how robust is this vision transformer, with proof, and how to make it more robust.

Importing this package imports neither torch nor timm; the command line starts at once because of
it.
"""

__version__ = "0.1.0"
