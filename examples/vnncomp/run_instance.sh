#!/bin/sh
# VNN-COMP: run_instance.sh v1 CATEGORY NETWORK QUERY RESULT SECONDS. Exit code 1: certvit refuses a file
[ "$1" = v1 ] || { echo "version '$1' is not v1" >&2; exit 1; }
certvit certify "$3" --vnnlib "$4" --result "$5" --seconds "$6" --force
case $? in
0 | 7 | 9) exit 0 ;; # holds, violated, unknown
*) echo error >"$5"; exit 1 ;;
esac
