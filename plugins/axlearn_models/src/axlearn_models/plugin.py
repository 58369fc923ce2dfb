"""What axlearn-models contributes to axcore: nothing yet, only its registration.

It will provide:

- experiments of the fuji (Llama 1-3), qwen and afm families, each with a small
  `FAMILY-test` variant;
- converters from and to the families' published weights.
"""
