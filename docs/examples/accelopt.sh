#!/usr/bin/env bash
# AccelOpt as it was released, on one case, under a budget: see docs/how-to/benchmark-your-optimizer.md, which says what
# run-accelopt.sh has to do. naive.py is the kernel to begin from.
set -euo pipefail

git clone https://github.com/zhang677/AccelOpt
# Judges and times naive.py, and writes traces/profile_results.csv
pytest-klineage external prepare accelopt traces --op gemm --platform sm90 --surface triton --root naive.py
pytest-klineage external run --op gemm --platform sm90 --surface triton --root naive.py --method accelopt-released \
    --model claude-opus-4-6 --stand-in --openai-upstream https://api.anthropic.com/v1 -- bash run-accelopt.sh
