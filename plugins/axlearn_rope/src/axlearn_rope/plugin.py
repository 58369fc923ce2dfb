"""What axlearn-rope contributes to axcore: nothing yet, only its registration.

It will provide:

- rotary position embeddings as a query/key transform of attention;
- scaling schemes for longer contexts;
- a modifier that gives rotary positions to any model.
"""
