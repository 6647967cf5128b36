"""What proxies cost: ours and its peers, side by side before one scripted engine."""
