"""DeepSeek-V2 and V3: latent attention, many small experts beside shared ones, dense first layers.

``config.py`` has the members, ``convert.py`` their published weights.
"""
