"""AWS Trainium support for axcore: instance types, mesh rules, compiler options and NKI kernels."""

__version__ = "0.1.0"
