"""From requests to tokens: scheduling, running steps, and the ways to call it."""
