"""Building blocks of model files: parameters plus one op call each."""
