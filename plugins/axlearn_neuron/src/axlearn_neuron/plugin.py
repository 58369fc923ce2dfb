"""What axlearn-neuron contributes to axcore: nothing yet, only its registration.

It will provide:

- instance types (`neuron-trn2.48xlarge-*` and others);
- mesh rules and compiler options per instance type;
- NKI kernels for the operations of `axcore.ops`.
"""
