"""How other evaluators judge a GEMM: themselves, or their algorithms written anew. The suite is beside it."""
