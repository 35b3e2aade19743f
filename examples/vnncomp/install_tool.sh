#!/bin/sh
# VNN-COMP: install_tool.sh v1
set -e
[ "$1" = v1 ] || { echo "version '$1' is not v1" >&2; exit 1; }
python3 -m pip install "certvit[onnx]"
