"""Memory of running and past sequences: what a layer keeps, pages, and the prefix tree."""
