#!/bin/sh
# VNN-COMP: install_tool.sh v1. Installs the clone that this script lies in
set -e
[ "$1" = v1 ] || { echo "version '$1' is not v1" >&2; exit 1; }
python3 -m pip install "$(dirname "$0")/../..[onnx]"
