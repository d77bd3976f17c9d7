"""Native kernels of single chips."""
