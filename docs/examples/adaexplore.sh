#!/usr/bin/env bash
# AdaExplore as it was released, on one case, under a budget: see docs/how-to/benchmark-your-optimizer.md.
set -euo pipefail

git clone https://github.com/StigLidu/AdaExplore
# Writes AdaExplore/datasets/KernelBench_klineage/level1/1_gemm-4096x4096x4096-bf16.py
pytest-klineage external prepare adaexplore AdaExplore --op gemm --platform sm90 --surface triton
# shellcheck disable=SC2016  # the variables are those of the run
pytest-klineage external run --op gemm --platform sm90 --surface triton --method adaexplore-released \
    --model claude-opus-4-6 --rewrite empty-system -- bash -c 'cd AdaExplore && python agent/agent_entry.py \
    --test_source KB --suffix _klineage --level 1 --problem_id 1 --agent_type MCTS --server_type claude \
    --model_name "$KLINEAGE_MODEL" --total_steps 1000 --num_processes 1 --remote_eval_url "$KLINEAGE_URL" \
    --exploration_weight 0.3 --reward_alpha 0.0 --p_large 0.2 --pool_size_extra_max 0 --geometric_p 0.6 \
    --dtype_str bf16 --gpu_name H200 --gpu_architecture Hopper --save_path out'
