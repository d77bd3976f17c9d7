"""Parts of bench/peers.py. Workers run in environments of their own, so this package imports nothing."""
