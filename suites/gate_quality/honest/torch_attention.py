# id: C7
# mechanism: the framework's attention, in a case that allows libraries
# case: fmha 1x2x32x16 fp32
# library: allow
# expect: scored
# source: written for this set
import torch


def run(q, k, v, **options):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
