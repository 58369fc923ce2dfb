"""What axlearn-tpu contributes to axcore: nothing yet, only its registration.

It will provide:

- instance types for every TPU generation
  (`tpu-v4-*`, `tpu-v5e-*`, `tpu-v5p-*`, `tpu-v6e-*`, `tpu-7x-*`);
- the TPU compiler for ahead-of-time compilation on a machine without a TPU;
- mesh rules and compiler options per instance type;
- Pallas kernels (splash attention, grouped matmul) for the operations of `axcore.ops`.
"""
