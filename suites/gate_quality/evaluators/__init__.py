"""How other evaluators judge a GEMM, written anew from descriptions. The suite that compares them is beside it."""
