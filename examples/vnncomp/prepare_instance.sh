#!/bin/sh
# VNN-COMP: prepare_instance.sh v1 CATEGORY NETWORK QUERY. Exit code 1: certvit does not read the network
[ "$1" = v1 ] || { echo "version '$1' is not v1" >&2; exit 1; }
[ -r "$3" ] && [ -r "$4" ]
