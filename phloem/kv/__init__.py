"""What a page holds, in bytes: pure arithmetic, no tensors. Nothing else knows kind or dtype."""
