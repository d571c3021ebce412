# id: C7
# mechanism: the framework's product, in a case that allows libraries
# case: gemm 48x40x56 fp32
# library: allow
# expect: scored
# source: written for this set


def run(a, b):
    return a @ b
