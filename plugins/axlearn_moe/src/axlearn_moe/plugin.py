"""What axlearn-moe contributes to axcore: nothing yet, only its registration.

It will provide:

- `MoE`, a feed-forward layer with routed experts;
- routers and their balancing losses;
- the modifier `axlearn-moe:moe`, which replaces the feed-forward layers of any model.
"""
