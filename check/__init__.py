"""A second pair of eyes: checks a proof of `certvit lipschitz --json` from the weights, with none of its code."""
