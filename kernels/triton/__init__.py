"""The ops in Triton, for NVIDIA's and AMD's GPUs: one a file, under the name of its contract and reference.

A file has the kernel, then its launcher, which does what the contract says and takes the GPU as one more argument.
Nothing outside imports this package but where Triton's ops were chosen, so Triton need not be there otherwise.
With TRITON_INTERPRET=1, set before Triton is imported, everything runs on the CPU, slowly, for tests.
"""
