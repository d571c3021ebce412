"""How other evaluators judge a GEMM: themselves, or their algorithms written again. The suite is beside it."""
