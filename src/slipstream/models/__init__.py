"""Model families, one file each. No file here knows a chip, a cache layout or a parallel plan."""
