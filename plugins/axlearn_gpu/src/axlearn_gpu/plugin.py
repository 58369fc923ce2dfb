"""What axlearn-gpu contributes to axcore: nothing yet, only its registration.

It will provide:

- instance types by machine and by GPU (`gpu-p5.48xlarge-*`, `gpu-h100-*` and others);
- the GPU compiler for ahead-of-time compilation on a machine without a GPU;
- mesh rules and compiler options per instance type;
- cuDNN, Pallas and Triton kernels (through jax-triton) for the operations of `axcore.ops`.
"""
