#!/usr/bin/env bash
# The suite as on other machines: `bash tests/elsewhere.sh [pytest's arguments, such as files]`. Exit 1 when a run fails.
# Each run is in a random order (its seed is said) beside a busy loop; threads and instructions differ from run to run.
set -uo pipefail
cd "$(dirname "$0")/.."
sh -c 'while :; do :; done' &
busy=$!
trap 'kill "$busy"' EXIT
failed=0
for machine in "1 default SSE41" "4 default SSE41" "1 avx2 AVX2" "4 avx2 AVX2"; do
  read -r threads capability isa <<<"$machine"
  echo "== $threads threads, $capability"
  # torch's own kernels, oneDNN's and MKL's, each by its own name for the same instructions
  CERTVIT_TEST_THREADS=$threads ATEN_CPU_CAPABILITY=$capability ONEDNN_MAX_CPU_ISA=$isa DNNL_MAX_CPU_ISA=$isa \
    MKL_ENABLE_INSTRUCTIONS="${isa/SSE41/SSE4_2}" OMP_NUM_THREADS=$threads \
    python -m pytest -n 2 --dist loadscope --random-order-bucket=module --random-order "$@" || failed=1
done
exit "$failed"
