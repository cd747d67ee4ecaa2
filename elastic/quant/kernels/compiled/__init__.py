"""Products with packed matrices in C++, compiled on the machine that runs them.

Way in: `integer_matmul`, whose operators are `elastic::int4_matmul` and `elastic::int8_matmul`.
`elastic.quant.kernels` imports it.
"""
