"""What each kernel launches, on tensors without memory: one file a kernel, of the kernel's name.

Each file has CASES: a name -> a function of the dtype that calls host functions of `lowtide.kernels.triton` with meta
tensors, of sizes that divide; test_ahead_of_time.py compiles every launch that it records. REGISTERS, where a file has
it: the budget of 32-bit registers a thread by case, else 128. NOT_VECTORIZED: cases whose loads are no full 16 bytes,
with the reason. DTYPES: the dtypes of the cases, where not those of activations.
"""
