# id: C2
# mechanism: fills the output that it is given
# case: gemm 8x8x8 fp32
# expect: scored
# source: written for this set
import baseline_output


def run(a, b, out):
    baseline_output.store(baseline_output.product(a, b), out)
