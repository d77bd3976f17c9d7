"""The nouns: requests, sampling parameters, outputs, errors, configuration, the step's batch. Pure Python and NumPy."""
