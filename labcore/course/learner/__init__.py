"""What a notebook calls: checks, hints, progress, claims, the engine comparison. And what stands behind them."""
