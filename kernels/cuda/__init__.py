"""CUDA forms: Triton programs, and cuBLAS where it is chosen by name and proved equal to the chain.

With TRITON_INTERPRET=1 the same programs run on CPU tensors, which is how they are tested without a GPU.
"""
