"""Model catalogs for axcore: fuji (Llama 1-3), qwen, afm and others."""

__version__ = "0.1.0"
