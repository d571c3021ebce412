# id: C8
# mechanism: returns its one output in a list
# case: gemm 8x8x8 fp32
# expect: scored
# source: written for this set
import baseline_output


def run(a, b):
    return [baseline_output.gemm(a, b)]
