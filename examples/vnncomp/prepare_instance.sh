#!/bin/sh
# VNN-COMP: prepare_instance.sh v1 CATEGORY NETWORK QUERY. Exit code 1: one of them cannot be read
[ "$1" = v1 ] || { echo "version '$1' is not v1" >&2; exit 1; }
[ -r "$3" ] && [ -r "$4" ]
