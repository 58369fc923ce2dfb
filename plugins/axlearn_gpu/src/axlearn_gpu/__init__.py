"""GPU support for axcore: instance types, mesh rules, compiler options and kernels."""

__version__ = "0.1.0"
