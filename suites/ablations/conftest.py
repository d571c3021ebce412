"""Where the ablations put what they make. Their options are in suites/conftest.py; nothing is measured here.

results/trajectories/<ablation>-<platform>/<method>/<kernel>-<trial>.jsonl   one optimization (--klineage-trajectories)
results/ablations/<ablation>-<platform>.jsonl                                every verdict with its samples
results/ablations/<ablation>-<platform>.md                                   the table, made from the trajectories
"""
